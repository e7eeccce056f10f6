"""The one error of the load generator: it cannot begin, and says what to change."""


class BenchError(Exception):
    """A flag, a dataset or a server that no load can be made with. A request that fails in a run is a Result."""
