//! Native code of the instances that the cases need.

use flashtile::kernels::decode::decode;
use flashtile::kernels::merge::merge;
use flashtile::kernels::plan::Side;
use flashtile_kernel::{Instance, bf16, f16};

/// The instance with native code, where there is one.
pub(crate) fn find(wanted: &Instance) -> Option<Instance> {
    let all = if wanted.kernel().name == "decode" { decodes() } else { merges() };
    all.into_iter().find(|instance| instance.generics() == wanted.generics())
}

/// Types of q and of both products, formats, dimensions, alignments, order of the rotation, pages.
macro_rules! decodes {
    ($($q:ident $k:ident $v:ident $kf:literal $vf:literal $d:literal $dv:literal $ka:literal $va:literal $order:literal $paged:literal;)*) => {
        vec![$({
            const K: Side = Side::new($kf, $d, 4, size_of::<$k>() / 2);
            const V: Side = Side::new($vf, $dv, 8, size_of::<$v>() / 2);
            decode::instance::<
                $q, $k, $v, $kf, $vf, $d, $dv,
                { K.pairs() }, { V.pairs() }, { K.words() }, { V.words() }, { K.words_of_pair }, { V.words_of_pair },
                { K.pair_words() }, { V.pair_words() }, { K.piece() }, { V.piece() }, $ka, $va, 1, 1, 2, $order, $paged,
            >()
        }),*]
    };
}

macro_rules! merges {
    ($($q:ident $dv:literal $order:literal;)*) => { vec![$(merge::instance::<$q, $dv, $order>()),*] };
}

fn decodes() -> Vec<Instance> {
    decodes! {
        bf16 f16 bf16 9 2 128 64 16 16 1 true;
        bf16 f16 f16 11 11 256 256 16 16 0 true;
        bf16 f16 f16 11 11 256 256 16 16 1 true;
        bf16 f16 f16 11 11 256 256 4 4 0 true;
        bf16 f16 f16 11 11 256 256 4 4 1 true;
        bf16 f16 f16 11 11 512 512 16 16 0 true;
        bf16 f16 f16 11 11 512 512 16 16 1 true;
        bf16 f16 f16 3 7 64 128 16 16 1 true;
        bf16 f16 f16 5 5 128 128 16 16 1 true;
        bf16 f16 f16 5 5 192 192 2 2 12 true;
        bf16 f16 f16 5 5 512 512 16 16 1 true;
        bf16 f16 f16 5 5 64 64 16 16 1 true;
        bf16 f16 f16 8 8 128 128 16 16 1 true;
        bf16 f16 f16 8 8 192 192 2 2 12 true;
        bf16 f16 f16 8 8 512 512 16 16 1 true;
        bf16 f16 f16 8 8 64 192 8 8 1 true;
        bf16 f16 f16 8 8 64 64 8 8 1 true;
        bf16 f16 f16 9 8 64 64 16 8 1 true;
        bf16 f32 f16 0 6 128 64 16 8 0 true;
        f16 f16 f16 10 10 256 256 16 16 1 true;
        f16 f16 f16 10 10 256 256 4 4 1 true;
        f16 f16 f16 10 10 512 512 16 16 1 true;
        f16 f16 f16 11 11 256 256 16 16 1 true;
        f16 f16 f16 11 11 256 256 4 4 1 true;
        f16 f16 f16 11 11 512 512 16 16 1 true;
        f16 f16 f16 3 3 128 128 16 16 1 true;
        f16 f16 f16 3 3 192 192 2 2 12 true;
        f16 f16 f16 3 3 512 512 16 16 1 true;
        f16 f16 f16 3 3 64 64 16 8 1 true;
        f16 f16 f16 3 7 64 128 16 16 1 true;
        f16 f16 f16 3 8 128 64 16 8 1 true;
        f16 f16 f16 7 7 128 128 16 16 1 true;
        f16 f16 f16 7 7 192 192 2 2 12 true;
        f16 f16 f16 7 7 512 512 16 16 1 true;
        f16 f16 f16 7 7 64 192 16 16 1 true;
        f16 f16 f16 7 7 64 64 16 16 1 true;
        f16 f16 f16 8 4 128 64 16 8 1 true;
        f16 f16 f16 9 8 64 64 16 8 1 true;
        f16 f16 f32 1 0 128 64 16 16 0 true;
        f32 f16 f16 11 11 256 256 16 16 1 true;
        f32 f16 f16 11 11 256 256 4 4 1 true;
        f32 f16 f16 11 11 512 512 16 16 1 true;
        f32 f16 f16 3 7 64 128 16 16 1 true;
        f32 f16 f16 4 3 128 64 16 8 0 true;
        f32 f16 f16 4 4 128 128 16 16 0 true;
        f32 f16 f16 4 4 192 192 2 2 0 true;
        f32 f16 f16 4 4 512 512 16 16 0 true;
        f32 f16 f16 4 4 64 64 16 8 0 true;
        f32 f16 f16 6 6 128 128 16 16 1 true;
        f32 f16 f16 6 6 192 192 2 2 12 true;
        f32 f16 f16 6 6 512 512 16 16 1 true;
        f32 f16 f16 6 6 64 192 8 8 1 true;
        f32 f16 f16 6 6 64 64 8 8 1 true;
        f32 f16 f16 9 8 64 64 16 8 1 true;
        f32 f16 f16 9 9 128 128 16 16 1 true;
        f32 f16 f16 9 9 192 192 2 2 12 true;
        f32 f16 f16 9 9 512 512 16 16 1 true;
        f32 f16 f16 9 9 64 192 16 16 1 true;
        f32 f16 f16 9 9 64 64 16 16 1 true;
        f32 f32 f16 1 7 128 64 16 16 0 true;
        f32 f32 f32 2 1 128 64 16 16 0 true;
        f32 f32 f32 0 0 16 16 16 8 0 false;
        f32 f32 f32 0 0 32 32 16 16 0 false;
        f32 f32 f32 0 0 32 32 16 16 0 true;
        f32 f32 f32 0 0 48 48 16 8 0 false;
        f32 f32 f32 0 0 64 64 16 16 0 false;
        f32 f32 f32 0 0 64 64 16 16 0 true;
        f32 f32 f32 0 0 80 80 16 8 0 false;
        f32 f32 f32 0 0 96 80 16 8 0 false;
        f32 f32 f32 0 0 96 96 16 16 0 false;
        f32 f32 f32 0 0 128 128 16 16 0 false;
        f32 f32 f32 0 0 192 128 16 16 0 false;
        f32 f32 f32 0 0 192 192 16 16 0 false;
        f32 f32 f32 0 0 256 256 16 16 0 false;
        f32 f32 f32 0 0 320 320 16 16 0 false;
        f32 f32 f32 0 0 512 512 16 16 0 false;
        f32 f32 f32 0 0 512 512 16 16 0 true;
        f16 f16 f16 1 1 16 16 8 4 0 false;
        f16 f16 f16 1 1 32 32 16 8 0 false;
        f16 f16 f16 1 1 32 32 16 8 0 true;
        f16 f16 f16 1 1 64 64 16 16 0 false;
        f16 f16 f16 1 1 64 64 16 16 0 true;
        f16 f16 f16 1 1 80 80 8 4 0 false;
        f16 f16 f16 1 1 96 80 16 4 0 false;
        f16 f16 f16 1 1 96 96 16 8 0 false;
        f16 f16 f16 1 1 128 128 16 16 0 false;
        f16 f16 f16 1 1 128 192 16 16 0 false;
        f16 f16 f16 1 1 192 192 16 16 0 false;
        f16 f16 f16 1 1 256 256 16 16 0 false;
        f16 f16 f16 1 1 320 320 16 16 0 false;
        f16 f16 f16 1 1 512 512 16 16 0 false;
        f16 f16 f16 1 1 512 512 16 16 0 true;
        bf16 bf16 bf16 2 2 16 16 8 4 0 false;
        bf16 bf16 bf16 2 2 32 32 16 8 0 false;
        bf16 bf16 bf16 2 2 32 32 16 8 0 true;
        bf16 bf16 bf16 2 2 64 64 16 16 0 false;
        bf16 bf16 bf16 2 2 64 64 16 16 0 true;
        bf16 bf16 bf16 2 2 80 80 8 4 0 false;
        bf16 bf16 bf16 2 2 96 80 16 4 0 false;
        bf16 bf16 bf16 2 2 96 96 16 8 0 false;
        bf16 bf16 bf16 2 2 128 128 16 16 0 false;
        bf16 bf16 bf16 2 2 192 192 16 16 0 false;
        bf16 bf16 bf16 2 2 256 256 16 16 0 false;
        bf16 bf16 bf16 2 2 320 320 16 16 0 false;
        bf16 bf16 bf16 2 2 512 512 16 16 0 false;
        bf16 bf16 bf16 2 2 512 512 16 16 0 true;
    }
}

fn merges() -> Vec<Instance> {
    merges! {
        bf16 64 1;
        bf16 128 1;
        bf16 192 12;
        bf16 256 1;
        bf16 512 1;
        f16 64 1;
        f16 128 1;
        f16 192 12;
        f16 256 1;
        f16 512 1;
        f32 64 1;
        f32 128 1;
        f32 192 12;
        f32 256 1;
        f32 512 1;
        bf16 16 0;
        bf16 32 0;
        bf16 64 0;
        bf16 80 0;
        bf16 96 0;
        bf16 128 0;
        bf16 192 0;
        bf16 256 0;
        bf16 320 0;
        bf16 512 0;
        f16 16 0;
        f16 32 0;
        f16 64 0;
        f16 80 0;
        f16 96 0;
        f16 128 0;
        f16 192 0;
        f16 256 0;
        f16 320 0;
        f16 512 0;
        f32 16 0;
        f32 32 0;
        f32 48 0;
        f32 64 0;
        f32 80 0;
        f32 96 0;
        f32 128 0;
        f32 192 0;
        f32 256 0;
        f32 320 0;
        f32 512 0;
    }
}
