//! The edges of the numbers: what validation accepts is computed, whatever its magnitude; what cannot be is refused.

use crate::support::{answer, build, quantizing};
use flashtile::cache::NO_PAGE;
use flashtile::testkit::{Built, Case, Keep, Runner};
use flashtile::{Codec, Dtype, QOffset, Visibility};

/// The same tensors with tables that name pages beyond the pool wherever no kept token needs one.
fn with_junk_pages(built: &Built) -> Built {
    let mut junk = built.clone();
    let mut count = 0;
    if let Some(tables) = &mut junk.tables {
        for page in tables.table.iter_mut().filter(|page| **page == NO_PAGE) {
            *page = [NO_PAGE - 1, 1 << 20, 1 << 31][count % 3];
            count += 1;
        }
    }
    assert!(count > 0, "every entry is of a kept token");
    junk
}

#[test]
fn table_entries_that_no_kept_token_uses_may_hold_anything() {
    let stored = [
        (Codec::Int8, Codec::Int8),
        (Codec::Tq6, Codec::Tq5),
        (Codec::Fp8, Codec::Fp8),
        (Codec::F32, Codec::Tq3),
        (Codec::Int8, Codec::F32),
        (Codec::F32, Codec::F32),
    ];
    let window = Visibility::window(Some(99), Some(0));
    for (k, v) in stored {
        for (page, q_len, keep) in
            [(8, 1, Keep::Seen), (16, 1, Keep::Seen), (48, 3, Keep::Seen), (16, 20, Keep::Seen)]
        {
            let case = Case::new(format!("junk_{k}_{v}"), [1, 4, 2, 0, 0, 64, 64], Dtype::F32)
                .cached(&[(q_len, 300), (q_len, 900), (q_len, q_len), (q_len, 513)], page, keep)
                .seeing(window)
                .at(QOffset::BottomRight)
                .stored(k, v);
            let built = build(&case);
            let junk = with_junk_pages(&built);
            for runner in quantizing(1) {
                let same = answer(&built, &runner).bits() == answer(&junk, &runner).bits();
                assert!(same, "{} in pages of {page} on {}", case.name, runner.name());
            }
        }
    }
}
