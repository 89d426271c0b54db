"""Finding, fetching and keeping models."""
