"""The engine behind the event loop: its thread, and what every front end sees of it."""
