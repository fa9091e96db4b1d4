"""What tenants may use: how it is decided, where it is counted, and what happens while Redis is away."""
