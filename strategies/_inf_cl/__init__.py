"""What `InfCLStrategy` is made of."""
