"""Receipts: signed statements of what ran for a request, by which the answer can be generated again and compared.

Only a server with the setting `receipt_key` opens this extension; a request without `receipt_nonce` costs it nothing.
"""
