"""Code generated from proto/rung/engine/v1; never edited. Rewritten by `python -m tests.contract.codegen`."""
