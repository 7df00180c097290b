"""The target model: loading it, its attention over the paged cache, its linear layers. No module here knows
requests.
"""
