"""What prefill and decode workers share."""
