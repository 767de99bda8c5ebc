from torch import Tensor

with_cuda: bool
cuda_archs: str
torch_version: str

LAST_TOKEN: int
TEMPERATURE: int
TOP_K: int
TOP_P: int
MIN_P: int
REPETITION_PENALTY: int
PRESENCE_PENALTY: int
FREQUENCY_PENALTY: int
SEED_LOW: int
SEED_HIGH: int
SAMPLE: int
FLAGS: int
NUM_BIAS: int
SLOT_WORDS: int
USES_COUNTS: int
LEADER_SUFFICES: int
LEADER_COLUMNS: int
EPILOGUE_NONE: int
EPILOGUE_RESIDUAL: int
EPILOGUE_SILU_MUL: int

def cpu_isa() -> str: ...
def embedding(
    out: Tensor, weight: Tensor, token_ids: Tensor, slots: Tensor | None, last_tokens: Tensor | None, first: bool, /
) -> None: ...
def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, partials: Tensor | None, /
) -> None: ...
def weigh_rows(
    weighted: Tensor, square_sums: Tensor, residual: Tensor, weight: Tensor, partials: Tensor | None, /
) -> None: ...
def embed_and_weigh(
    weighted: Tensor,
    square_sums: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    slots: Tensor | None,
    last_tokens: Tensor | None,
    first: bool,
    /,
) -> None: ...
def rope_kv(
    q_out: Tensor,
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    kv_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    square_sums: Tensor | None,
    settled: bool,
    /,
) -> None: ...
def prefill_attention(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    q_starts: Tensor,
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    /,
) -> None: ...
def decode_attention(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    workspace: Tensor | None,
    settled: bool = False,
) -> None: ...
def attention_workspace_size(max_seqs: int, max_seq_len: int, num_q_heads: int, head_dim: int, /) -> int: ...
def silu_mul(out: Tensor, x: Tensor, /) -> None: ...
def packed_weight_size(weight: Tensor, /) -> int: ...
def pack_weight(packed: Tensor, weight: Tensor, /) -> None: ...
def linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    n: int,
    bias: Tensor | None,
    epilogue: int,
    num_chunks: int,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
) -> None: ...
def linear_leaders(
    logits: Tensor,
    leaders: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_chunks: int,
    slots: Tensor,
    state: Tensor,
    square_sums: Tensor | None,
    eps: float,
    /,
) -> None: ...
def linear_residual_norm(
    residual: Tensor,
    weighted: Tensor,
    new_square_sums: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    num_chunks: int,
    /,
) -> None: ...
def linear_rope_kv(
    q: Tensor,
    x: Tensor,
    square_sums: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    num_chunks: int,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    kv_cache: Tensor,
    settled: bool,
    /,
) -> None: ...
def linear_chunks(weight: Tensor, epilogue: int, /) -> int: ...
def linear_uses_wgmma(weight: Tensor, epilogue: int, /) -> bool: ...
def update_state(state: Tensor, pairs: Tensor, /) -> None: ...
def copy_words(to: Tensor, source: Tensor, /) -> None: ...
def sample(
    tokens: Tensor,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: Tensor,
    counts: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    bias_until: Tensor | None,
    workspace: Tensor | None,
    leaders: Tensor | None,
    settled: bool,
    token_ids: Tensor | None,
    step_positions: Tensor | None,
    turns: Tensor | None,
    host_tokens: Tensor | None,
    /,
) -> None: ...
def sample_workspace_size(max_rows: int, vocab_size: int, /) -> int: ...
def logprobs(
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    logits: Tensor,
    tokens: Tensor,
    /,
) -> None: ...
def count_tokens(counts: Tensor, token_ids: Tensor, num_prompt_tokens: int, /) -> None: ...
