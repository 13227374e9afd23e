//! Results that are NaN or infinite.

use crate::operands::Operands;
use flashtile::Dtype;
use flashtile_bench::elements::{NonFinite, non_finite};
use serde_json::{Value, json};

/// Numbers of results that are not finite, and of inputs, where there are such results.
pub(crate) struct Results {
    out: NonFinite,
    /// Without negative infinity, which is the logsumexp of a row that sees no key.
    lse: NonFinite,
    /// Elements of q, k and v that are not finite, padding included.
    inputs: Option<[(&'static str, usize); 3]>,
}

fn total(of: NonFinite) -> usize {
    of.nan + of.positive + of.negative
}

impl Results {
    pub(crate) fn count(operands: &Operands<'_>, out: &[u8], lse: &[u8]) -> Self {
        let out = non_finite(operands.problem.dtype(), out);
        let lse = NonFinite { negative: 0, ..non_finite(Dtype::F32, lse) };
        let inputs =
            || operands.tensors().map(|(name, dtype, bytes)| (name, total(non_finite(dtype, bytes))));
        let inputs = (total(out) + total(lse) > 0).then(inputs);
        Self { out, lse, inputs }
    }

    /// Counts of non-finite results and where they may come from; `None` if all results are finite.
    pub(crate) fn words(&self) -> Option<String> {
        let inputs = self.inputs.as_ref()?;
        let of = |name: &str, found: NonFinite| {
            let counts = [("NaN", found.nan), ("infinite", found.positive + found.negative)];
            let counts: Vec<String> =
                counts.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")).collect();
            (!counts.is_empty()).then(|| format!("{name} has {}", counts.join(" and ")))
        };
        let results: Vec<String> = [of("out", self.out), of("lse", self.lse)].into_iter().flatten().collect();
        let causes: Vec<String> =
            inputs.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{n} of {name}")).collect();
        let cause = if causes.is_empty() {
            "q, k and v are finite: a score, a bias or a result exceeds the range of its dtype".to_owned()
        } else {
            let all: usize = inputs.iter().map(|(_, n)| n).sum();
            let are = if all == 1 { "is" } else { "are" };
            format!("of the inputs, {} {are} NaN or infinite, padding included", causes.join(", "))
        };
        Some(format!("{}; {cause}", results.join(", ")))
    }

    pub(crate) fn json(&self) -> Value {
        let of = |found: NonFinite| json!({"nan": found.nan, "infinite": found.positive + found.negative});
        json!({
            "out": of(self.out),
            "lse": of(self.lse),
            "inputs": self.inputs.map(|inputs| -> Value {
                inputs.into_iter().map(|(name, n)| (name.to_owned(), json!(n))).collect::<serde_json::Map<_, _>>().into()
            }),
        })
    }
}
