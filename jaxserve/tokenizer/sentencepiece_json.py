"""A SentencePiece model written as tokenizer.json, for programs that read nothing else."""

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.sentencepiece_model import MODEL_FILE, SPACE, load_sentencepiece
from jaxserve.tokenizer.sentencepiece_proto import Rules, rules_of
from jaxserve.tokenizer.settings import read_settings


def tokenizer_json(folder: Path) -> str:
    """The tokenizer.model of a checkpoint folder as the tokenizers library writes it.

    Ids are those of Tokenizer.encode(), with one exception: where only the opening of a text gets a
    dummy space (`legacy` is false), the library gives none to a text that begins with a space.

    Raises:
        TokenizerError: the model is not BPE, or does with its text what the library cannot, or
        there is none.
    """
    settings = read_settings(folder)
    ours = load_sentencepiece(folder / MODEL_FILE, settings)
    model = (folder / MODEL_FILE).read_bytes()
    rules = rules_of(model)
    if problem := _problem(rules, bool(ours.added_tokens)):
        raise TokenizerError(
            f"{folder / MODEL_FILE}: {problem}, which cannot be written as tokenizer.json (add one)"
        )
    library = Library(_bpe(SentencePieceProcessor(model_proto=model)))
    _set_spaces(library, rules, bool(settings.legacy))
    library.add_special_tokens([AddedToken(name, normalized=False) for name in ours.special_tokens])
    library.add_tokens([AddedToken(name, normalized=False) for name in ours.added_tokens])
    affixes = ours.encode("")
    before = [token for token in affixes if token == ours.bos_id]
    library.post_processor = _affixes(library, before, affixes[len(before) :])
    return library.to_str()


def _problem(rules: Rules, has_symbols: bool) -> str | None:
    if not rules.bpe:
        return "is no BPE model"
    if rules.rewrites:
        return "normalizes its text"
    return (
        "puts a space before texts that begin with its symbols"
        if rules.dummy_prefix and has_symbols
        else None
    )


def _bpe(processor: SentencePieceProcessor) -> models.BPE:
    """SentencePiece joins the pair whose piece has the best score, the library the one that its
    list has first.
    """
    ids = range(processor.vocab_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    words = [
        i
        for i in ids
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    ]
    merges = [
        (piece[:cut], piece[cut:])
        for i in sorted(words, key=lambda i: -processor.get_score(i))
        for piece in [processor.id_to_piece(i)]
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return models.BPE(
        vocab,
        merges,
        unk_token=processor.id_to_piece(processor.unk_id()),
        fuse_unk=True,
        byte_fallback=any(map(processor.is_byte, ids)),
    )


def _set_spaces(library: Library, rules: Rules, legacy: bool) -> None:
    """A visible space for every space, and one before the text, or before every part between
    special tokens.
    """
    visible = normalizers.Replace(" ", SPACE)
    restored = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.dummy_prefix and legacy:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible])
    elif rules.dummy_prefix:
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    else:
        library.normalizer = visible
    if rules.dummy_prefix:
        restored.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(restored)


def _affixes(
    library: Library, before: list[int], after: list[int]
) -> processors.TemplateProcessing:
    names = {token: library.id_to_token(token) for token in (*before, *after)}
    template = [*(names[token] for token in before), "$A", *(names[token] for token in after)]
    return processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[(name, token) for token, name in names.items()]
    )
