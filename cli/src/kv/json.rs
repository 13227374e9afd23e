//! The report as one JSON document, described in `docs/kv.md`.

use super::choice::Candidate;
use super::diagnosis::finite;
use super::measure::{Measured, Sums, sampled};
use super::pairs::Pair;
use super::report::Report;
use crate::run::dims_json;
use serde_json::{Value, json};

impl Report<'_> {
    pub(super) fn json(&self) -> Value {
        let choice = self.choice;
        let named =
            |name: &str, why: &dyn std::fmt::Display| json!({"name": name, "reason": why.to_string()});
        json!({
            "rows": self.args.rows,
            "equalize": self.codecs.power,
            "keep_first": self.codecs.keep[0],
            "keep_last": self.codecs.keep[1],
            "gate": {"kl": self.gate.kl, "nrmse": self.gate.nrmse},
            "keys": self.codecs.keys.iter().enumerate().map(|(key, of)| json!({
                "codec": of.codec.name(),
                "centered": of.centered,
                "equalized": of.equalized,
                "bits": finite(self.bits(key, self.same(key))),
            })).collect::<Vec<_>>(),
            "values": self.codecs.values.iter().map(|codec| codec.name()).collect::<Vec<_>>(),
            "left_out": self.codecs.left_out.iter().map(|(codec, why)| named(codec.name(), why)).collect::<Vec<_>>(),
            "pairs": self.pairs.iter().map(|(pair, measured)| self.pair(pair, measured)).collect::<Vec<_>>(),
            "all": self.all.as_ref().map(|all| self.errors(all, |key| self.worst_head(key).map(|(pair, head, kl)| {
                json!({"pair": pair, "head": head, "kl": finite(kl)})
            }))),
            "candidates": self.candidates.iter().map(|c| self.candidate(*c)).collect::<Vec<_>>(),
            "recommended": choice.map(|choice| self.candidate(choice.best)),
            "meets_gate": choice.map(|choice| choice.meets),
            "nearest_cheaper": choice.and_then(|choice| choice.cheaper).map(|c| self.candidate(c)),
            "refused": self.refused.iter().map(|refused| named(&refused.name, &refused.why)).collect::<Vec<_>>(),
            "unread": self.unread,
        })
    }

    fn pair(&self, pair: &Pair<'_>, measured: &Measured) -> Value {
        let [k, v, q] = &pair.tensors;
        let [k_dtype, v_dtype] = pair.dtypes();
        let errors = self.errors(&measured.all, |key| {
            measured.worst_head(key).map(|(head, kl)| json!({"head": head, "kl": finite(kl)}))
        });
        let (rows, all_rows) = sampled(pair, self.args.rows);
        json!({
            "name": pair.name,
            "k": k,
            "v": v,
            "q": if pair.keys_as_queries { Some(k) } else { pair.has_queries.then_some(q) },
            "k_dtype": k_dtype.name(),
            "v_dtype": v_dtype.name(),
            "dims": dims_json(pair.problem.dims()),
            "visibility": pair.problem.desc().visibility.to_string(),
            "scale": pair.problem.scale(),
            "softcap": pair.problem.desc().softcap,
            "tokens": measured.tokens,
            "query_rows": [rows, all_rows],
            "queries": measured.all.queries,
            "diagnosis": measured.diagnosis.json(),
            "errors": errors,
        })
    }

    fn errors(&self, sums: &Sums, worst: impl Fn(usize) -> Option<Value>) -> Value {
        let number = |x: Option<f64>| x.and_then(finite);
        let keys = (0..self.codecs.keys.len()).map(|key| {
            json!({
                "error": number(sums.k_error(key)),
                "logit_rmse": number(sums.logit_rmse(key)),
                "kl": number(sums.kl(key)),
                "worst_head": worst(key),
                "refused": sums.keys[key].as_ref().err(),
            })
        });
        let values = (0..self.codecs.values.len()).map(|value| {
            json!({"error": number(sums.v_error(value)), "refused": sums.values[value].as_ref().err()})
        });
        let of_key = |key: usize| -> Vec<Option<f64>> {
            (0..self.codecs.values.len()).map(|value| number(sums.nrmse(key, value))).collect()
        };
        json!({
            "keys": keys.collect::<Vec<_>>(),
            "values": values.collect::<Vec<_>>(),
            "nrmse": (0..self.codecs.keys.len()).map(of_key).collect::<Vec<_>>(),
        })
    }

    fn candidate(&self, candidate: Candidate) -> Value {
        let key = self.codecs.keys[candidate.key];
        json!({
            "k": key.codec.name(),
            "centered": key.centered,
            "equalized": key.equalized,
            "v": self.codecs.values[candidate.value].name(),
            "bits": candidate.bits,
            "kl": finite(candidate.kl),
            "nrmse": finite(candidate.nrmse),
            "meets_gate": candidate.meets(self.gate),
        })
    }
}
