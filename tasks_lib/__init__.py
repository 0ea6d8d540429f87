"""Prefect tasks around the steps: what is cached, retried, submitted and shown. No domain logic."""
