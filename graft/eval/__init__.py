"""Numbers about decoding: `lossless` compares methods with plain decoding, token by token."""
