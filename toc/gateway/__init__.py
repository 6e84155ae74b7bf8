"""The HTTP gateway: a codec over what the SDK and operators do, for programs in any language."""
