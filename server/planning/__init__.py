"""Finds the highest load that keeps a promise, what breaks first above it, and which setting moves it."""
