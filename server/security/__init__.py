"""Who may ask, how much, and how long a connection may take."""
