"""Hours in minutes: producers, workers and every kind of disturbance, judged by a ledger outside of the store."""
