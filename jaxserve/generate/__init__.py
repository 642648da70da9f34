"""Program `jaxserve generate`: text or a conversation from a checkpoint."""
