from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageFormat(_message.Message):
    __slots__ = ("fingerprint", "dtype", "page_size", "layout", "num_layers", "num_kv_heads", "head_dim", "layers")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    dtype: str
    page_size: int
    layout: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerHeads]
    def __init__(self, fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., layout: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerHeads, _Mapping]]] = ...) -> None: ...

class LayerHeads(_message.Message):
    __slots__ = ("num_kv_heads", "head_dim")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    head_dim: int
    def __init__(self, num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("token_ids", "first_page", "cache_salt", "format", "request_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_page: int
    cache_salt: str
    format: PageFormat
    request_id: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., first_page: _Optional[int] = ..., cache_salt: _Optional[str] = ..., format: _Optional[_Union[PageFormat, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("num_pages", "data")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    data: bytes
    def __init__(self, num_pages: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
