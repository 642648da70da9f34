"""Writes a SentencePiece model as tokenizer.json, for programs that read only that file."""

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from jaxserve.tokenizer.beside_model import MODEL_FILE
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.sentencepiece_model import SPACE, SentencePieceTokenizer, load_sentencepiece
from jaxserve.tokenizer.sentencepiece_proto import Rules, rules_of
from jaxserve.tokenizer.settings import read_settings


def tokenizer_json(folder: Path, model_ids: int | None = None) -> str:
    """Return the tokenizer.model of a checkpoint folder as tokenizer.json.

    The result encodes as Tokenizer.encode() does, with one exception: where only the opening of a
    text gets a dummy space (`legacy` is false), the tokenizers library gives none to a text that
    begins with a space. `model_ids` is as in load_tokenizer.

    Raises:
        TokenizerError: The model is missing or not BPE, or processes text in a way that the library
            does not support.
    """
    settings = read_settings(folder)
    ours = load_sentencepiece(folder / MODEL_FILE, settings, model_ids)
    rules = rules_of(ours.model)
    problem = _problem(rules, bool(ours.symbols))
    if problem:
        raise TokenizerError(
            f"{folder / MODEL_FILE}: {problem}, which cannot be written as tokenizer.json (add one)"
        )
    library = Library(_bpe(SentencePieceProcessor(model_proto=ours.model)))
    _set_spaces(library, rules, bool(settings.legacy))
    library.add_tokens(_added_tokens(ours))
    affixes = ours.encode("")
    before = [token for token in affixes if token == ours.bos_id]
    library.post_processor = _affixes(library, before, affixes[len(before) :])
    return library.to_str()


def _added_tokens(ours: SentencePieceTokenizer) -> list[AddedToken]:
    """Return the tokens that are found by their names, new ones in the order of their ids."""
    special = ours.special_tokens
    flags: dict[str, dict[str, bool]] = {name: {} for name in (*special, *ours.added_tokens)}
    for token in ours.declared.values():
        flags[token.name] = {
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
        }
    ids = special | ours.added_tokens
    return [
        AddedToken(name, normalized=False, special=name in special, **flags[name])
        for name in sorted(flags, key=lambda name: ids[name])
    ]


def _problem(rules: Rules, has_symbols: bool) -> str | None:
    """Return why a model cannot be written as tokenizer.json, or None."""
    if not rules.bpe:
        return "is no BPE model"
    if rules.rewrites:
        return "normalizes its text"
    if rules.dummy_prefix and has_symbols:
        return "puts a space before texts that begin with its symbols"
    return None


def _bpe(processor: SentencePieceProcessor) -> models.BPE:
    """Convert scores to merges.

    SentencePiece joins the pair whose piece has the best score; the tokenizers library joins the
    pair that comes first in its list of merges.
    """
    ids = range(processor.vocab_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    words = [
        i
        for i in ids
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    ]
    merges = list[tuple[str, str]]()
    for i in sorted(words, key=lambda i: -processor.get_score(i)):
        piece = processor.id_to_piece(i)
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                merges.append((piece[:cut], piece[cut:]))
    return models.BPE(
        vocab,
        merges,
        unk_token=processor.id_to_piece(processor.unk_id()),
        fuse_unk=True,
        byte_fallback=any(map(processor.is_byte, ids)),
    )


def _set_spaces(library: Library, rules: Rules, legacy: bool) -> None:
    """Make the library write spaces as SentencePiece does.

    Every space becomes a visible one. With a dummy prefix there is another one before the text, or
    in legacy mode before every part between special tokens.
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
