"""What a step costs, and the same engine in simulated time."""
