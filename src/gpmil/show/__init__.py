"""Pictures, pages and maps."""
