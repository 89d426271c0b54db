"""Answers that follow a grammar: compiled on workers, masked while the model computes. No protobuf here."""
