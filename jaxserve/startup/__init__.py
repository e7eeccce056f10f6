"""What happens once: settings resolved, weights read, programs compiled or loaded."""
