//! Cases at the limits of the numeric range.

use super::cases::{Case, MaskFill};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::problem::{QOffset, Visibility};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// ALiBi far from every key, and mask biases near the limits of f16.
pub(super) fn edges() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for offset in [100_000, -100_000, 1_000_000, -1_000_000, (1 << 30) - 3, 3 - (1 << 30)] {
            let far = Case::new(format!("edge_alibi_at_{offset}_{dtype}"), [1, 4, 2, 3, 270, 64, 64], dtype);
            cases.push(far.alibi().at(QOffset::At(offset)));
        }
        let far =
            |name: &str| Case::new(format!("edge_alibi_{name}_{dtype}"), [2, 4, 2, 5, 40, 64, 64], dtype);
        let late = QOffset::At(200_000);
        cases.push(far("causal_past_the_keys").alibi().causal(late));
        cases.push(far("window").alibi().seeing(Visibility::window(Some(199_970), None)).at(late));
        cases.push(far("kv_lens").alibi().kv_lens(&[40, 3]).at(late));
        cases.push(far("sinks_softcap").alibi().sinks().softcap(5.0).at(late));
        cases.push(far("mask").alibi().mask(MaskKind::Bool, "h", MaskFill::Random).at(late));
        let packed = Case::new(format!("edge_alibi_packed_{dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype);
        cases.push(packed.packed(&[(3, 20), (4, 33), (2, 0)]).alibi().at(late));
    }
    cases
}
