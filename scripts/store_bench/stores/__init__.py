"""The stores that are measured, each behind the same few calls (`base.StoreUnderTest`)."""
