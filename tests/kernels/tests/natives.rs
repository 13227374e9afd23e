//! Native code of the instances that the cases need.

use flashtile_gpu::kernels::merge::merge;
use flashtile_gpu::{native_decode, native_prefill};
use flashtile_kernel::prelude::Element;
use flashtile_kernel::{Instance, bf16, f16};
use std::sync::LazyLock;

/// The instance with native code, if there is one.
pub(crate) fn find(wanted: &Instance) -> Option<Instance> {
    static ALL: LazyLock<Vec<Instance>> = LazyLock::new(|| {
        let coded = [coded::<f32>(), coded::<f16>(), coded::<bf16>()];
        [
            decodes(),
            odd(),
            splits(),
            pages(),
            kept(),
            equalized(),
            tiles(),
            planned(),
            merges(),
            prefills(),
            mixed_prefills(),
            one_block(),
            counted(),
        ]
        .into_iter()
        .chain(coded)
        .flatten()
        .collect()
    });
    let is = |instance: &&Instance| {
        instance.kernel().name == wanted.kernel().name && instance.generics() == wanted.generics()
    };
    ALL.iter().find(is).cloned()
}

/// Tiles of 8 rows, tiles of 16 keys, SIMD groups; types of q and of both products, formats, dimensions.
macro_rules! decodes {
    ([$t:literal $u:literal $s:literal] $($q:ident $k:ident $v:ident $kf:literal $vf:literal $d:literal $dv:literal;)*) => {
        vec![$(native_decode!([$q, $k, $v] [$kf, $vf, $d, $dv] [$t, $u, $s])),*]
    };
}

macro_rules! merges {
    ($($q:ident $dv:literal $order:literal;)*) => { vec![$(merge::instance::<$q, $dv, $order>()),*] };
}

fn decodes() -> Vec<Instance> {
    decodes! { [1 1 2]
        bf16 f16 bf16 9 2 128 64;
        bf16 f16 f16 12 12 256 256;
        bf16 f16 f16 11 11 256 256;
        bf16 f16 f16 12 12 512 512;
        bf16 f16 f16 11 11 512 512;
        bf16 f16 f16 3 7 64 128;
        bf16 f16 f16 5 5 128 128;
        bf16 f16 f16 5 5 192 192;
        bf16 f16 f16 5 5 512 512;
        bf16 f16 f16 5 5 64 64;
        bf16 f16 f16 8 8 128 128;
        bf16 f16 f16 8 8 192 192;
        bf16 f16 f16 8 8 512 512;
        bf16 f16 f16 8 8 64 192;
        bf16 f16 f16 8 8 64 64;
        bf16 f16 f16 9 8 64 64;
        bf16 f32 f16 0 6 128 64;
        f16 f16 f16 10 10 256 256;
        f16 f16 f16 10 10 512 512;
        f16 f16 f16 11 11 256 256;
        f16 f16 f16 11 11 512 512;
        f16 f16 f16 3 3 128 128;
        f16 f16 f16 3 3 192 192;
        f16 f16 f16 3 3 512 512;
        f16 f16 f16 3 3 64 64;
        f16 f16 f16 3 7 64 128;
        f16 f16 f16 3 8 128 64;
        f16 f16 f16 7 7 128 128;
        f16 f16 f16 7 7 192 192;
        f16 f16 f16 7 7 512 512;
        f16 f16 f16 7 7 64 192;
        f16 f16 f16 7 7 64 64;
        f16 f16 f16 8 4 128 64;
        f16 f16 f16 9 8 64 64;
        f16 f16 f32 1 0 128 64;
        f32 f16 f16 11 11 256 256;
        f32 f16 f16 11 11 512 512;
        f32 f16 f16 3 7 64 128;
        f32 f16 f16 4 3 128 64;
        f32 f16 f16 4 4 128 128;
        f32 f16 f16 4 4 192 192;
        f32 f16 f16 4 4 512 512;
        f32 f16 f16 4 4 64 64;
        f32 f16 f16 6 6 128 128;
        f32 f16 f16 6 6 192 192;
        f32 f16 f16 6 6 512 512;
        f32 f16 f16 6 6 64 192;
        f32 f16 f16 6 6 64 64;
        f32 f16 f16 9 8 64 64;
        f32 f16 f16 9 9 128 128;
        f32 f16 f16 9 9 192 192;
        f32 f16 f16 9 9 512 512;
        f32 f16 f16 9 9 64 192;
        f32 f16 f16 9 9 64 64;
        f32 f16 f16 13 13 64 64;
        f32 f16 f16 13 13 128 128;
        f32 f16 f16 13 13 192 192;
        f32 f16 f16 13 13 512 512;
        f32 f16 f16 3 13 128 64;
        f16 f16 f16 13 13 64 64;
        bf16 f16 f16 13 7 128 64;
        f32 f32 f16 1 7 128 64;
        f32 f32 f32 2 1 128 64;
        f32 f32 f32 0 0 16 16;
        f32 f32 f32 0 0 32 32;
        f32 f32 f32 0 0 48 48;
        f32 f32 f32 0 0 64 64;
        f32 f32 f32 0 0 80 80;
        f32 f32 f32 0 0 96 80;
        f32 f32 f32 0 0 96 96;
        f32 f32 f32 0 0 128 128;
        f32 f32 f32 0 0 192 128;
        f32 f32 f32 0 0 192 192;
        f32 f32 f32 0 0 256 256;
        f32 f32 f32 0 0 320 320;
        f32 f32 f32 0 0 512 512;
        f16 f16 f16 1 1 16 16;
        f16 f16 f16 1 1 32 32;
        f16 f16 f16 1 1 64 64;
        f16 f16 f16 1 1 80 80;
        f16 f16 f16 1 1 96 80;
        f16 f16 f16 1 1 96 96;
        f16 f16 f16 1 1 128 128;
        f16 f16 f16 1 1 128 192;
        f16 f16 f16 1 1 192 192;
        f16 f16 f16 1 1 256 256;
        f16 f16 f16 1 1 320 320;
        f16 f16 f16 1 1 512 512;
        bf16 bf16 bf16 2 2 16 16;
        bf16 bf16 bf16 2 2 32 32;
        bf16 bf16 bf16 2 2 64 64;
        bf16 bf16 bf16 2 2 80 80;
        bf16 bf16 bf16 2 2 96 80;
        bf16 bf16 bf16 2 2 96 96;
        bf16 bf16 bf16 2 2 128 128;
        bf16 bf16 bf16 2 2 192 192;
        bf16 bf16 bf16 2 2 256 256;
        bf16 bf16 bf16 2 2 320 320;
        bf16 bf16 bf16 2 2 512 512;
    }
}

/// Dimensions that are no multiple of 16, of elements and of codes.
fn odd() -> Vec<Instance> {
    decodes! { [1 1 2]
        f32 f32 f32 0 0 1 1;
        f32 f32 f32 0 0 3 3;
        f32 f32 f32 0 0 8 8;
        f32 f32 f32 0 0 20 20;
        f32 f32 f32 0 0 24 24;
        f32 f32 f32 0 0 31 31;
        f32 f32 f32 0 0 33 33;
        f32 f32 f32 0 0 40 24;
        f32 f32 f32 0 0 63 63;
        f32 f32 f32 0 0 65 65;
        f32 f32 f32 0 0 127 127;
        f32 f32 f32 0 0 129 129;
        f32 f32 f32 0 0 255 255;
        f32 f32 f32 0 0 257 257;
        f32 f32 f32 0 0 64 1;
        f32 f32 f32 0 0 65 63;
        f16 f16 f16 1 1 1 1;
        f16 f16 f16 1 1 3 3;
        f16 f16 f16 1 1 8 8;
        f16 f16 f16 1 1 20 20;
        f16 f16 f16 1 1 24 24;
        f16 f16 f16 1 1 31 31;
        f16 f16 f16 1 1 33 33;
        f16 f16 f16 1 1 40 24;
        f16 f16 f16 1 1 63 63;
        f16 f16 f16 1 1 65 65;
        f16 f16 f16 1 1 127 127;
        f16 f16 f16 1 1 129 129;
        f16 f16 f16 1 1 255 255;
        f16 f16 f16 1 1 257 257;
        f16 f16 f16 1 1 512 31;
        f16 f16 f16 1 1 65 33;
        f16 f16 f16 1 1 8 512;
        bf16 bf16 bf16 2 2 1 1;
        bf16 bf16 bf16 2 2 3 3;
        bf16 bf16 bf16 2 2 8 8;
        bf16 bf16 bf16 2 2 20 20;
        bf16 bf16 bf16 2 2 24 24;
        bf16 bf16 bf16 2 2 31 31;
        bf16 bf16 bf16 2 2 33 33;
        bf16 bf16 bf16 2 2 40 24;
        bf16 bf16 bf16 2 2 63 63;
        bf16 bf16 bf16 2 2 65 65;
        bf16 bf16 bf16 2 2 127 127;
        bf16 bf16 bf16 2 2 129 129;
        bf16 bf16 bf16 2 2 255 255;
        bf16 bf16 bf16 2 2 257 257;
        bf16 bf16 bf16 2 2 1 64;
        bf16 bf16 bf16 2 2 33 257;
        f16 f16 f16 3 3 5 24;
        bf16 f16 f16 7 8 72 33;
        f32 f16 f16 5 9 20 112;
        f16 f16 f16 4 4 24 40;
        bf16 f16 f16 6 7 3 1;
        f32 f16 f16 8 6 80 33;
        f32 f16 f16 13 6 80 33;
        bf16 f16 f16 7 13 72 33;
        f16 f16 f16 4 4 80 80;
        f16 f16 f16 7 3 200 130;
        f32 f32 f16 1 7 24 24;
        f16 f32 f32 0 0 24 24;
    }
}

/// One SIMD group, so that there is one partial result per split.
fn splits() -> Vec<Instance> {
    decodes! { [1 1 1]
        f32 f32 f32 0 0 64 64;
        f16 f16 f16 1 1 64 64;
        bf16 bf16 bf16 2 2 64 64;
        f32 f16 f16 3 3 64 64;
        f16 f16 f16 7 7 64 64;
        bf16 f16 f16 8 8 64 64;
    }
}

/// Codes in pages of any size and in one page.
fn pages() -> Vec<Instance> {
    decodes! { [1 1 2]
        f32 f16 f16 4 4 256 256;
        f16 f16 f16 3 3 256 256;
        bf16 f16 f16 5 5 256 256;
        f32 f16 f16 6 6 256 256;
        f16 f16 f16 7 7 256 256;
        bf16 f16 f16 8 8 256 256;
        f32 f16 f16 9 9 256 256;
        f32 f16 f16 13 13 256 256;
        f32 f16 f16 4 4 320 64;
        f16 f16 f16 3 3 320 64;
        bf16 f16 f16 5 5 320 64;
        f32 f16 f16 6 6 320 64;
        f16 f16 f16 7 7 320 64;
        bf16 f16 f16 8 8 320 64;
        f32 f16 f16 9 9 320 64;
        f32 f16 f16 13 13 320 64;
        f32 f16 f16 4 4 64 192;
        f32 f16 f16 13 13 64 192;
        f16 f16 f16 3 3 64 192;
        bf16 f16 f16 5 5 64 192;
    }
}

/// Tokens that are kept in 16 bits beside codes.
fn kept() -> Vec<Instance> {
    decodes! { [1 1 2]
        bf16 f32 f16 0 13 128 64;
        bf16 f16 bf16 13 2 128 64;
        f32 f32 f16 1 13 128 64;
        f16 f16 f16 13 13 128 64;
        f16 f16 f16 13 13 80 80;
        f16 f16 f16 13 13 128 128;
        bf16 f16 f16 13 13 64 64;
        bf16 f16 f16 13 13 96 96;
        bf16 f16 f16 13 13 112 112;
        bf16 f16 f16 13 13 128 128;
    }
}

/// Codes whose keys have factors.
fn equalized() -> Vec<Instance> {
    decodes! { [1 1 2]
        f32 f16 f16 3 3 128 128;
        f16 f16 f16 9 9 64 64;
        bf16 f16 f16 8 8 96 96;
        f32 f16 f16 7 7 128 128;
        f16 f16 f16 6 6 80 80;
        bf16 f16 f16 5 5 112 112;
    }
}

/// Tiles of every number of rows, keys and SIMD groups.
fn tiles() -> Vec<Instance> {
    macro_rules! tiles {
        ($([$t:literal $u:literal $s:literal])*) => {
            [$(decodes! { [$t $u $s]
                f32 f32 f32 0 0 64 64;
                f16 f16 f16 1 1 64 64;
                bf16 bf16 bf16 2 2 64 64;
                f32 f16 f16 3 3 64 64;
                bf16 f16 f16 7 7 64 64;
                f16 f16 f32 1 0 64 64;
                f16 f16 f16 4 9 64 64;
            }),*].concat()
        };
    }
    tiles!([2 1 4] [1 2 4] [2 2 1] [4 1 2] [1 1 8])
}

/// Instances that plans choose for elements whose dimensions are not powers of two, with few rows and with many.
fn planned() -> Vec<Instance> {
    macro_rules! planned {
        ($($q:ident $f:literal)*) => {
            [$(
                decodes! { [1 1 4]
                    $q $q $q $f $f 80 80;
                    $q $q $q $f $f 96 96;
                },
                decodes! { [2 1 4]
                    $q $q $q $f $f 80 80;
                    $q $q $q $f $f 96 96;
                },
            )*].concat()
        };
    }
    planned!(f32 0 f16 1 bf16 2)
}

/// Instances that plans choose for codes of such dimensions, and for two tiles of 16 keys at a time.
fn coded<Q: Element>() -> Vec<Instance> {
    [
        decodes! { [1 2 4]
            Q f16 f16 3 3 80 80;
            Q f16 f16 3 3 96 96;
            Q f16 f16 3 3 128 128;
            Q f16 f16 3 8 96 80;
        },
        decodes! { [1 1 4]
            Q f16 f16 4 4 80 80;
            Q f16 f16 4 4 96 96;
            Q f16 f16 7 7 128 128;
            Q f16 f16 7 7 80 80;
            Q f16 f16 7 7 96 96;
            Q f16 f16 5 5 80 80;
            Q f16 f16 5 5 96 96;
            Q f16 f16 6 6 80 80;
            Q f16 f16 6 6 96 96;
            Q f16 f16 8 8 80 80;
            Q f16 f16 8 8 96 96;
            Q f16 f16 9 9 80 80;
            Q f16 f16 9 9 96 96;
            Q f16 f16 9 4 80 96;
            Q f16 f16 13 13 80 80;
            Q f16 f16 13 13 96 96;
        },
    ]
    .concat()
}

/// Sixteens of rows of a team, sixteens of keys of a block, SIMD groups, SIMD groups of a team; dimensions.
macro_rules! prefills {
    ($([$m:literal $u:literal $s:literal $w:literal] $d:literal $dv:literal;)*) => {
        vec![$(
            native_prefill!([f32, f32, f32] [0, 0, $d, $dv] [$m, $u, $s, $w]),
            native_prefill!([f16, f16, f16] [1, 1, $d, $dv] [$m, $u, $s, $w]),
            native_prefill!([bf16, bf16, bf16] [2, 2, $d, $dv] [$m, $u, $s, $w]),
        )*]
    };
}

fn prefills() -> Vec<Instance> {
    prefills! {
        [1 1 2 1] 16 16;
        [1 1 2 1] 32 32;
        [1 1 2 1] 64 64;
        [1 1 2 1] 48 48;
        [1 1 2 1] 80 80;
        [1 1 2 1] 96 80;
        [1 1 2 1] 96 96;
        [1 1 2 1] 128 128;
        [1 1 2 1] 64 128;
        [1 1 2 1] 128 64;
        [1 4 4 1] 64 64;
        [2 2 1 1] 64 64;
        [1 2 8 1] 64 64;
        [1 4 1 1] 80 80;
        [1 1 2 1] 3 3;
        [1 1 2 1] 8 8;
        [1 1 2 1] 20 20;
        [1 1 2 1] 24 24;
        [1 1 2 1] 31 31;
        [1 1 2 1] 33 33;
        [1 1 2 1] 40 24;
        [1 1 2 1] 63 63;
        [1 1 2 1] 65 65;
        [1 1 2 1] 127 127;
        [1 1 2 1] 129 129;
        [1 1 2 1] 192 192;
        [1 1 2 1] 255 255;
        [1 1 2 1] 256 256;
        [1 1 2 1] 257 257;
        [1 1 2 1] 320 320;
        [1 1 2 1] 512 512;
        [1 1 2 2] 64 64;
        [1 1 4 2] 192 128;
        [1 1 4 4] 512 512;
        [1 1 2 1] 1 1;
        [1 1 2 2] 20 65;
        [1 1 2 2] 200 144;
    }
}

/// Native prefill kernels with given types of q and of both products, and given formats.
macro_rules! mixed_prefills {
    ($([$m:literal $u:literal $s:literal $w:literal] $q:ident $k:ident $v:ident $kf:literal $vf:literal $d:literal $dv:literal;)*) => {
        vec![$(native_prefill!([$q, $k, $v] [$kf, $vf, $d, $dv] [$m, $u, $s, $w])),*]
    };
}

/// Keys and values that take the same threadgroup memory in turn.
fn one_block() -> Vec<Instance> {
    macro_rules! one_block {
        ($([$m:literal $u:literal $s:literal $w:literal] $q:ident $p:ident $f:literal $d:literal;)*) => {
            vec![$(native_prefill!([$q, $p, $p] [$f, $f, $d, $d] [$m, $u, $s, $w, 1])),*]
        };
    }
    one_block! {
        [1 1 2 1] f32 f32 0 64;
        [1 1 2 1] f16 f16 1 64;
        [1 1 2 1] bf16 bf16 2 64;
        [1 1 2 2] f32 f32 0 64;
        [1 1 2 2] f16 f16 1 64;
        [1 1 2 2] bf16 bf16 2 64;
        [1 1 2 1] bf16 f16 3 64;
        [1 1 2 2] f16 f16 7 64;
        [1 1 2 2] f32 f32 0 20;
        [1 1 2 2] f16 f16 1 20;
        [1 1 2 2] bf16 bf16 2 20;
        [1 1 4 4] bf16 f16 5 80;
        [1 1 4 4] f16 f16 3 80;
        [1 1 8 4] f16 f16 1 512;
        [1 1 8 4] bf16 bf16 2 512;
    }
}

/// Instances whose operations are counted: of plans for Apple's GPUs.
fn counted() -> Vec<Instance> {
    let decodes = [
        decodes! { [1 1 4]
            f16 f16 f16 1 1 64 64;
            f16 f16 f16 1 1 128 128;
            f16 f16 f16 1 1 256 256;
            f16 f16 f16 1 1 512 512;
        },
        decodes! { [1 1 8] f16 f16 f16 1 1 128 128; },
        decodes! { [2 1 4] f16 f16 f16 1 1 128 128; },
        decodes! { [2 1 8] f16 f16 f16 1 1 128 128; },
    ];
    let prefills = vec![
        native_prefill!([f16, f16, f16] [1, 1, 128, 128] [1, 2, 8, 1]),
        native_prefill!([f16, f16, f16] [1, 1, 128, 128] [1, 2, 4, 1]),
        native_prefill!([f16, f16, f16] [1, 1, 128, 128] [1, 2, 4, 2]),
        native_prefill!([f16, f16, f16] [1, 1, 256, 256] [1, 1, 8, 2]),
    ];
    decodes.into_iter().chain([prefills]).flatten().collect()
}

fn mixed_prefills() -> Vec<Instance> {
    mixed_prefills! {
        [1 1 2 2] f16 f16 f16 3 3 64 64;
        [1 1 2 2] f16 f16 f16 7 7 64 64;
        [1 1 2 1] bf16 bf16 bf16 2 2 1 64;
        [1 1 2 1] f16 f16 f16 1 1 8 512;
        [1 1 2 1] bf16 bf16 bf16 2 2 33 257;
        [1 1 2 1] f32 f32 f32 0 0 64 1;
        [1 1 2 1] f16 f16 f16 1 1 65 33;
        [1 1 2 1] f32 f32 f32 0 0 65 63;
        [1 1 2 1] f16 f16 f16 1 1 128 192;
        [1 1 2 1] f32 f32 f32 0 0 192 128;
        [1 1 2 1] f16 f16 f16 1 1 512 31;
        [1 1 2 1] f16 f16 f16 3 3 64 64;
        [1 1 2 1] bf16 f16 f16 3 3 128 128;
        [1 1 2 1] f32 f16 f16 4 4 64 64;
        [1 1 2 1] bf16 f16 f16 5 5 64 64;
        [1 1 2 1] bf16 f16 f16 6 6 64 64;
        [1 1 2 1] f16 f16 f16 7 7 64 64;
        [1 1 2 1] f32 f16 f16 7 7 128 128;
        [1 1 2 1] bf16 f16 f16 8 8 64 64;
        [1 1 2 1] bf16 f16 f16 9 9 64 64;
        [1 1 2 1] f16 f16 f16 13 13 64 64;
        [1 1 2 2] f16 f16 f16 13 13 64 64;
        [1 1 2 1] bf16 f16 f16 13 7 64 64;
        [1 1 2 1] f32 f16 f16 7 13 33 64;
        [1 2 4 2] bf16 f16 f16 3 3 80 96;
        [1 2 4 2] bf16 f16 f16 7 7 80 96;
        [1 2 4 2] bf16 f16 f16 4 9 80 96;
        [1 2 4 2] bf16 f16 f16 7 7 192 192;
        [1 1 2 2] bf16 f16 f16 10 10 256 256;
        [1 1 2 2] f16 f16 f16 11 11 256 256;
        [1 1 4 4] bf16 f16 f16 10 11 512 512;
        [1 1 2 1] f16 f16 f32 1 0 64 64;
        [1 1 2 1] bf16 bf16 f16 2 3 64 64;
        [1 1 2 1] f16 f16 f16 7 1 33 64;
    }
}

fn merges() -> Vec<Instance> {
    merges! {
        bf16 80 20;
        bf16 96 12;
        f16 80 20;
        f16 96 12;
        bf16 144 0;
        f16 144 0;
        f32 144 0;
        f32 80 20;
        f32 96 12;
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
        f32 1 0;
        f32 3 0;
        f32 8 0;
        f32 20 0;
        f32 24 0;
        f32 31 0;
        f32 33 0;
        f32 63 0;
        f32 65 0;
        f32 127 0;
        f32 129 0;
        f32 255 0;
        f32 257 0;
        f16 1 0;
        f16 3 0;
        f16 8 0;
        f16 20 0;
        f16 24 0;
        f16 31 0;
        f16 33 0;
        f16 63 0;
        f16 65 0;
        f16 127 0;
        f16 129 0;
        f16 255 0;
        f16 257 0;
        bf16 1 0;
        bf16 3 0;
        bf16 8 0;
        bf16 20 0;
        bf16 24 0;
        bf16 31 0;
        bf16 33 0;
        bf16 63 0;
        bf16 65 0;
        bf16 127 0;
        bf16 129 0;
        bf16 255 0;
        bf16 257 0;
        f16 24 12;
        bf16 33 1;
        f32 112 1;
        bf16 112 1;
        f16 40 0;
        bf16 1 1;
        f32 33 1;
        f16 130 1;
        f32 24 12;
    }
}
