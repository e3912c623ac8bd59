"""Which decode worker keeps the KV of a conversation's last turn."""
