"""The gateway's gRPC API at the level of text: another wire for the requests that HTTP brings."""
