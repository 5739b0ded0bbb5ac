"""Bytes and seconds of published versions, `js.weights`, beside other ways to send them."""
