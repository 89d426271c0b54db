"""The gRPC service; the only part of the engine that knows protobuf."""
