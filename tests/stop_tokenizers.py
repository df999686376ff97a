"""Small tokenizers of the two common kinds: byte-level BPE and sentencepiece."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The answer is 42. </answer> Größe und Maß, ça va; the other answer is \n\n Question: 12",
    "日本語の答え 日本語の問い 日本 🦊🦊🦊 🦉 aab ab abab aabab",
]

# Tokens and their bytes, without the 256 byte tokens.
SENTENCEPIECE = {
    "▁": b" ",
    "a": b"a",
    "b": b"b",
    "▁a": b" a",
    "ab": b"ab",
    "▁▁": b"  ",
    "日": "日".encode(),
    "本日": "本日".encode(),
    "</answer>x": b"</answer>x",
    "a▁b": b"a b",
    "<0x1>": b"<0x1>",
}


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in Qwen: 256 bytes, merges over the bytes of CORPUS, special tokens, three others added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool>", "\u00e9 b", "\u00e9")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )


def sentencepiece_tokenizer(*, byte_tokens: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: "▁" for spaces, one prepended to every text, byte tokens for unknown characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    words = {token: index for index, token in enumerate(["<unk>", "</s>", *names, *SENTENCEPIECE])}
    model = models.BPE(words, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=byte_tokens, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )
