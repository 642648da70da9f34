"""The server: one service object behind gRPC and HTTP, an engine on a thread of its own."""
