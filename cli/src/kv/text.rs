//! The report as text.

use super::choice::{Candidate, HALF_BITS};
use super::diagnosis::Worst;
use super::measure::{Measured, Sums, sampled};
use super::pairs::Pair;
use super::report::Report;
use crate::report::{Table, counted};

/// Largest number of pairs of tensors that are listed by default.
const MAX_PAIRS: usize = 64;

/// [`KeyCodec::words`](flashtile::quality::KeyCodec::words) of the keys of a report, in the order of its rows.
const TRANSFORMS: [&str; 3] = ["", " centered", " centered and equalized"];

/// The error columns.
const ERRORS: [&str; 6] = ["k error", "v error", "logit rmse", "kl", "worst kl", "nrmse"];

impl Report<'_> {
    /// The whole report; `all` has the errors over all pairs.
    pub(super) fn text(&self, all: &Sums) -> String {
        let mut text = self.heading();
        text += &self.missing();
        text += &format!(
            "\nerrors over {}:\n{}",
            self.all_pairs(),
            self.codecs_table(all, |key| self.worst_kl(key))
        );
        for (codec, why) in &self.codecs.left_out {
            text += &format!("{codec} is left out: {why}\n");
        }
        text += &self.refusals();
        text += &format!("\n{}", self.diagnosis());
        if let Some(recommendation) = self.recommendation() {
            text += &format!("\n{recommendation}");
        }
        if self.args.per_layer {
            for (pair, measured) in &self.pairs {
                let worst = |key| Self::of_head(measured.worst_head(key));
                text += &format!("\n{}:\n{}", pair.name, self.codecs_table(&measured.all, worst));
                text += &format!("keys have {}\n", measured.diagnosis.bias_words());
                text += &format!("{}\n", measured.diagnosis.channel_words());
            }
        } else if let Some(choice) = self.choice {
            text += &format!("\n{}", self.pairs_table(choice.best));
        }
        text
    }

    fn all_pairs(&self) -> String {
        match &self.pairs[..] {
            [(pair, _)] => pair.name.clone(),
            pairs => format!("all {} pairs", pairs.len()),
        }
    }

    /// Describes the tensors that were read.
    fn heading(&self) -> String {
        let Some((pair, measured)) = self.pairs.first() else { return String::new() };
        let (dims, desc) = (pair.problem.dims(), pair.problem.desc());
        let names = match &self.pairs[..] {
            [_] => pair.name.clone(),
            [.., (last, _)] => format!("{} to {}", pair.name, last.name),
            [] => String::new(),
        };
        let alike = self.pairs.iter().all(|(p, m)| p.problem.dims() == dims && m.tokens == measured.tokens);
        let each = if alike || self.pairs.len() == 1 { "" } else { "the first has " };
        let [k, v] = pair.dtypes();
        let dtypes = if k == v { k.to_string() } else { format!("{k} and {v}") };
        let mut text = format!(
            "{} of keys and values, {names}: {each}{} of {}{} elements, {dtypes}, {}\n",
            counted(self.pairs.len(), "pair"),
            counted(dims.kv_heads, "head"),
            dims.head_dim,
            if dims.value_dim == dims.head_dim { String::new() } else { format!(" and {}", dims.value_dim) },
            counted(measured.tokens, "token"),
        );
        if let Some((asked, _)) = self.pairs.iter().find(|(pair, _)| pair.has_queries) {
            let (rows, of) = sampled(asked, self.args.rows);
            let heads = asked.problem.dims().q_heads;
            let rows = if rows == of { format!("all {of}") } else { format!("{rows} evenly spaced of {of}") };
            let softcap = desc.softcap.map_or_else(String::new, |cap| format!(", softcap {cap}"));
            text += &format!(
                "queries: {rows} rows of each of {}, visibility {}, scale {}{softcap}\n",
                counted(heads, "query head"),
                asked.problem.desc().visibility,
                asked.problem.scale()
            );
        }
        match self.codecs.keep {
            [0, 0] => {}
            [first, last] => {
                text += &format!(
                    "in 16 bits beside codes: the first {first} tokens and the last {last} that a query sees\n"
                );
            }
        }
        text
    }

    /// Notes about columns that are empty or need an explanation.
    fn missing(&self) -> String {
        let names = |is: &dyn Fn(&Pair<'_>) -> bool| -> Vec<&str> {
            self.pairs.iter().filter(|(pair, _)| is(pair)).map(|(pair, _)| pair.name.as_str()).collect()
        };
        let mut text = String::new();
        let without = names(&|pair| !pair.has_queries);
        if !without.is_empty() {
            let of = if without.len() == self.pairs.len() {
                String::new()
            } else {
                format!(" of {}", without.join(", "))
            };
            let q = &self.pairs[0].0.tensors[0];
            let stem = q.strip_suffix('k').map_or_else(|| "q".to_owned(), |stem| format!("{stem}q"));
            text += &format!(
                "no queries{of}: logit rmse, kl and nrmse, which need them, are missing there, and with them a recommendation \
                 (expected tensors such as {stem}, or --keys-as-queries)\n"
            );
        }
        if !names(&|pair| pair.keys_as_queries).is_empty() {
            text += "queries are the keys themselves, as asked: each token attends to tokens like itself\n";
        }
        text
    }

    /// A row for each codec of both keys and values.
    fn codecs_table(&self, sums: &Sums, worst: impl Fn(usize) -> String) -> Table {
        let mut table = Table::new(["codec", "bits"].into_iter().chain(ERRORS));
        for words in TRANSFORMS {
            for (key, codec) in self.codecs.keys.iter().enumerate().filter(|(_, key)| key.words() == words) {
                let value = self.same(key);
                let of_keys = if words.is_empty() { "" } else { ", keys" };
                let name = format!("{}{of_keys}{words}", codec.codec);
                let mut row = vec![name, format!("{:.2}", self.bits(key, value))];
                row.extend(errors(sums, [key, value], worst(key)));
                table.push(row);
            }
        }
        table
    }

    /// The largest divergence of a head, and the head.
    fn worst_kl(&self, key: usize) -> String {
        match self.worst_head(key) {
            Some((name, head, kl)) if self.pairs.len() > 1 && kl > 0.0 => {
                format!("{} {name} head {head}", small(kl))
            }
            worst => Self::of_head(worst.map(|(_, head, kl)| (head, kl))),
        }
    }

    fn of_head(worst: Option<(usize, f64)>) -> String {
        match worst {
            None => "-".to_owned(),
            // Without errors there is no worst head.
            Some((_, 0.0)) => small(0.0),
            Some((head, kl)) => format!("{} head {head}", small(kl)),
        }
    }

    /// Codecs that can store only some of the pairs of tensors.
    fn refusals(&self) -> String {
        let mut text = String::new();
        for (pair, measured) in &self.pairs {
            let keys = self.codecs.keys.iter().zip(&measured.all.keys);
            let keys = keys.filter_map(|(key, of)| {
                let words = key.words();
                let of_keys = if words.is_empty() { "" } else { " with keys" };
                of.as_ref().err().map(|why| (format!("{}{of_keys}{words}", key.codec), why))
            });
            let values = self.codecs.values.iter().zip(&measured.all.values);
            let values =
                values.filter_map(|(codec, of)| of.as_ref().err().map(|why| (codec.to_string(), why)));
            let refused: Vec<(String, &String)> = keys.chain(values).collect();
            if let Some((_, why)) = refused.first() {
                let names = refused.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
                text += &format!("{}: {names} cannot store it: {why}\n", pair.name);
            }
        }
        text
    }

    /// Properties of the keys at their worst.
    fn diagnosis(&self) -> String {
        let worst = |of: fn(&Measured) -> f64| {
            self.pairs.iter().max_by(|a, b| of(a.1).total_cmp(&of(b.1))).map(|(pair, m)| (pair, &m.diagnosis))
        };
        let at = |pair: &Pair<'_>, head: usize| {
            if self.pairs.len() == 1 { format!("head {head}") } else { format!("{} head {head}", pair.name) }
        };
        let mut text = String::new();
        if let Some((pair, d)) = worst(|m| m.diagnosis.bias.ratio) {
            text += &format!("keys, worst at {}: {}\n", at(pair, d.bias.head), d.bias_words());
        }
        if let Some((pair, d)) = worst(|m| m.diagnosis.channel.ratio) {
            let place = format!("{} channel {}", at(pair, d.channel.head), d.index);
            text += &format!("keys, worst at {place}: {}\n", d.channel_words());
        }
        text
    }

    /// `keys int8 centered, values tq5`.
    fn named(&self, candidate: Candidate) -> String {
        let key = self.codecs.keys[candidate.key];
        format!("keys {}{}, values {}", key.codec, key.words(), self.codecs.values[candidate.value])
    }

    /// `keys int8 centered, values tq5: 6.63 bits per element`.
    fn words(&self, candidate: Candidate) -> String {
        format!("{}: {:.2} bits per element", self.named(candidate), candidate.bits)
    }

    /// The options of `run` and `plan` that store keys and values that way, or, with tokens in 16 bits, of a cache.
    fn options(&self, candidate: Candidate) -> String {
        let key = self.codecs.keys[candidate.key];
        let value = self.codecs.values[candidate.value];
        let [first, last] = self.codecs.keep;
        if [first, last] != [0; 2] {
            return format!("of the cache: k {}, v {value}, keep_first {first}, keep_last {last}", key.codec);
        }
        let center = if key.centered { " --center-keys" } else { "" };
        let equalize = self.codecs.power.filter(|_| key.equalized);
        let equalize = equalize.map_or_else(String::new, |power| format!(" --equalize-keys {power}"));
        format!("of run and plan: --k-codec {} --v-codec {value}{center}{equalize}", key.codec)
    }

    fn recommendation(&self) -> Option<String> {
        let choice = self.choice?;
        let best = choice.best;
        let of_pairs = if self.pairs.len() == 1 { "" } else { " in every pair" };
        let gate =
            format!("kl at most {} and nrmse at most {}{of_pairs}", small(self.gate.kl), self.gate.nrmse);
        let of_worst = if self.pairs.len() == 1 { "" } else { "in the worst pair " };
        let errors = |c: Candidate| format!("{of_worst}kl {}, nrmse {}", small(c.kl), small(c.nrmse));
        let smaller = format!("{:.2} times smaller than f16", HALF_BITS / best.bits);
        let mut text = if choice.meets {
            format!("recommended: {}, {smaller}\n  {} (gate: {gate})\n", self.words(best), errors(best))
        } else {
            format!(
                "no pair of codecs meets the gate: {gate}\nnearest to it: {}, {smaller}\n  {}\n",
                self.words(best),
                errors(best)
            )
        };
        text += &format!("  options {}\n", self.options(best));
        if let Some(cheaper) = choice.cheaper {
            text += &format!("  the nearest cheaper one, {}: {}\n", self.words(cheaper), errors(cheaper));
        }
        Some(text)
    }

    /// A row for each pair of tensors with the recommended codecs.
    fn pairs_table(&self, candidate: Candidate) -> String {
        let mut table = Table::new(["pair", "bias", "outlier"].into_iter().chain(ERRORS));
        let mut listed: Vec<(usize, f64)> = (0..self.pairs.len())
            .map(|at| (at, self.pairs[at].1.all.kl(candidate.key).unwrap_or(0.0)))
            .collect();
        listed.sort_by(|a, b| b.1.total_cmp(&a.1));
        listed.truncate(MAX_PAIRS);
        listed.sort_by_key(|(at, _)| *at);
        for &(at, _) in &listed {
            let (pair, measured) = self.pairs[at];
            let d = &measured.diagnosis;
            let place = |worst: Worst| format!("{:.1} head {}", worst.ratio, worst.head);
            let mut row = vec![pair.name.clone(), place(d.bias), place(d.channel)];
            let worst = Self::of_head(measured.worst_head(candidate.key));
            row.extend(errors(&measured.all, [candidate.key, candidate.value], worst));
            table.push(row);
        }
        let of = if listed.len() < self.pairs.len() {
            format!(", the {MAX_PAIRS} with the largest kl of {}", self.pairs.len())
        } else {
            String::new()
        };
        format!("{}{of}:\n{table}", self.named(candidate))
    }
}

/// Cells of the error columns.
fn errors(sums: &Sums, [key, value]: [usize; 2], worst: String) -> [String; 6] {
    let cell = |x: Option<f64>| x.map_or_else(|| "-".to_owned(), small);
    [
        cell(sums.k_error(key)),
        cell(sums.v_error(value)),
        cell(sums.logit_rmse(key)),
        cell(sums.kl(key)),
        worst,
        cell(sums.nrmse(key, value)),
    ]
}

/// An error with two digits, with an exponent if it is small.
fn small(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        x.to_string()
    } else if x >= 0.001 {
        let decimals = (2.0 - x.log10().floor() - 1.0).clamp(0.0, 4.0) as usize;
        format!("{x:.decimals$}")
    } else {
        format!("{x:.1e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_two_digits() {
        let cases = [
            (0.0, "0"),
            (4.16e-5, "4.2e-5"),
            (0.00123, "0.0012"),
            (0.0449, "0.045"),
            (0.5, "0.50"),
            (1.26, "1.3"),
            (126.0, "126"),
            (f64::INFINITY, "inf"),
        ];
        for (x, text) in cases {
            assert_eq!(small(x), text);
        }
    }
}
