"""Compiling for accelerators that are not there: what a program costs on a machine before the machine is rented."""
