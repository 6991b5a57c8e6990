"""Glyphs, their names, the cache and the split."""

import unicodedata
from dataclasses import fields

import numpy as np
import pytest
import torch

from examples.glyph_clip import glyphs
from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.glyphs import GlyphTable, decode_name, encode_names, load_glyphs

pytestmark = pytest.mark.slow  # renders 40,000 glyphs


@pytest.fixture(scope="module")
def data(glyph_cache) -> GlyphData:
    data = GlyphData(cache_dir=str(glyph_cache), progress=False)
    data.prepare_data()
    data.setup()
    return data


def test_cache_round_trip_is_exact_and_renders_once(glyph_cache, monkeypatch, tmp_path):
    whole = load_glyphs(glyph_cache, progress=False)
    table = whole.rows(np.arange(0, len(whole), 50))  # compressing all glyphs takes seconds
    renderings = iter([table])
    monkeypatch.setattr(glyphs, "_render_all", lambda progress: next(renderings))
    folder = tmp_path / "new"
    data = GlyphData(cache_dir=str(folder), progress=False)
    data.prepare_data()
    # A cached file is not read before `setup`.
    monkeypatch.setattr(np, "load", lambda path: pytest.fail(f"read {path}"))
    data.prepare_data()
    monkeypatch.undo()
    cached = load_glyphs(folder, progress=False)
    assert cached.images.dtype == cached.codes.dtype == np.uint8
    for field in fields(GlyphTable):
        np.testing.assert_array_equal(getattr(cached, field.name), getattr(table, field.name))
    assert len(list(folder.iterdir())) == 1


def test_split_separates_families_and_covers_them(data):
    train, test = data.tables["train"], data.tables["test"]
    assert not set(train.font_ids.tolist()) & set(test.font_ids.tolist())
    assert len(set(train.font_ids.tolist())) == len(glyphs.TRAIN_FONTS)
    assert not any("Serif" in font for font in glyphs.TRAIN_FONTS)
    assert len(train) > 30_000
    assert len(set(train.name_ids.tolist())) > 7_000
    assert 3_200 < len(test) < 3_300
    assert len(set(test.name_ids.tolist())) == len(test)


def test_names_are_those_of_named_printable_characters(data):
    for table in data.tables.values():
        for row in range(0, len(table), 97):
            character = chr(table.name_ids[row])
            assert decode_name(table.codes[row]) == unicodedata.name(character)
            assert unicodedata.category(character)[0] in "LNSP"


def test_images_show_ink_and_no_pair_comes_twice(data):
    train = data.tables["train"]
    assert train.images.reshape(len(train), -1).max(axis=1).min() > 0
    pairs = {
        (image.tobytes(), int(name))
        for image, name in zip(train.images, train.name_ids, strict=True)
    }
    assert len(pairs) == len(train)


def test_glyphs_keep_their_size_and_height(data):
    test = data.tables["test"]
    ink = {name: test.images[test.name_ids == ord(name)][0] > 64 for name in "oO,'"}
    assert ink["O"].any(axis=1).sum() > ink["o"].any(axis=1).sum() + 3
    assert np.flatnonzero(ink[","].any(axis=1)).min() > np.flatnonzero(ink["'"].any(axis=1)).max()


def test_encoded_names_are_stable_and_reversible():
    names = ["LATIN SMALL LETTER A", "CJK UNIFIED IDEOGRAPH-4E00"]
    codes = encode_names(names)
    assert [decode_name(row) for row in codes] == names
    assert codes[0, :7].tolist() == [24, 13, 32, 21, 26, 1, 31]


def test_encode_names_foreign_character_is_refused():
    with pytest.raises(ValueError, match="'latin small letter a'"):
        encode_names(["latin small letter a"])


def test_train_batches_hold_no_twins_and_travel_as_uint8(data):
    for batch in data.train_dataloader():
        assert batch["image"].dtype == batch["text"].dtype == torch.uint8
        assert len(batch["name_id"].unique()) == len(batch["name_id"]) >= 2048


def test_test_batches_serve_every_pair(data):
    assert sum(len(batch["name_id"]) for batch in data.test_dataloader()) == 3268


def test_validation_fonts_leave_the_training_set(data):
    held_out = GlyphData(validation_fonts=["STIXGeneral"], cache_dir=str(data.cache_dir))
    held_out.setup()
    train, validation = held_out.tables["train"], held_out.tables["validation"]
    assert len(set(validation.font_ids.tolist())) == 1
    assert not set(train.font_ids.tolist()) & set(validation.font_ids.tolist())
    assert sum(len(batch["name_id"]) for batch in held_out.val_dataloader()[0]) == len(validation)


def test_validation_on_the_test_family_is_refused():
    with pytest.raises(ValueError, match="'DejaVuSerif'"):
        GlyphData(validation_fonts=["DejaVuSerif"])
