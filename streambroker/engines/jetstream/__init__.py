"""The engine on NATS JetStream: nats-server 2.10 and later."""
