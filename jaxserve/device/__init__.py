"""What a step is on the device: its shapes, its one upload, its programs, its sampler and its state."""
