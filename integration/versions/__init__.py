"""The supported versions of servers, frameworks, clients and Python, each combination a cell; see `__main__`."""
