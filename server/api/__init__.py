"""The HTTP routes and the shapes that they read and write."""
