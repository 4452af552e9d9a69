"""The ports of the services, each with its recorded messages and its checks."""
