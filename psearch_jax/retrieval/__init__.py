"""What is searched: passages, embedding, indexes and searching."""
