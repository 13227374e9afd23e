//! `flashtile kv`: what the codecs of KV caches would do to keys and values, and which to take.

mod choice;
mod diagnosis;
mod json;
mod measure;
mod pairs;
mod picture;
mod text;

use crate::args::KvArgs;
use crate::failure::{Failure, Result};
use crate::input::Mapped;
use crate::machine;
use crate::output::Destination;
use crate::report;
use choice::{Candidate, Choice, Gate};
use measure::{Codecs, Measured, Sums, measure};
use pairs::{Listing, Pair, Refused};
use std::process::ExitCode;

/// Tensors that change the weights of a model and are not part of the report.
const OF_WEIGHTS: [&str; 3] = ["mask", "sinks", "alibi_slopes"];

/// Exit status where a pair has no answer.
const REFUSED: u8 = 2;

pub(crate) fn run(args: &KvArgs) -> Result<ExitCode> {
    machine::on_threads(args.threads, || compare(args))
}

/// Everything that is reported.
struct Report<'a> {
    args: &'a KvArgs,
    codecs: &'a Codecs,
    gate: Gate,
    pairs: Vec<(&'a Pair<'a>, &'a Measured)>,
    refused: &'a [Refused],
    unread: &'a [String],
    /// Of all pairs that have an answer; `None` where none has.
    all: Option<Sums>,
    candidates: &'a [Candidate],
    choice: Option<Choice>,
}

fn compare(args: &KvArgs) -> Result<ExitCode> {
    let mapped = Mapped::open(&args.input)?;
    let archive = mapped.archive()?;
    let Listing { pairs, mut refused, unread } = Listing::read(&archive, args)?;
    let picture = args.svg.as_deref().map(Destination::new).transpose()?;
    picture.as_ref().map_or(Ok(()), |picture| picture.differs_from(&args.input))?;
    if !unread.is_empty() {
        let names: Vec<&str> = unread.iter().map(String::as_str).collect();
        let names = report::some(&names);
        if args.strict {
            let what =
                format_args!("tensors not understood: {names}, expected keys, values, queries, kv_lens");
            return Err(archive.refuse(what));
        }
        report::note(archive.refuse(format_args!("note: tensors not read: {names}")));
        let of_weights: Vec<&str> =
            unread.iter().map(String::as_str).filter(|name| OF_WEIGHTS.contains(name)).collect();
        if !of_weights.is_empty() {
            let names = of_weights.join(", ");
            report::note(
                archive.refuse(format_args!("note: weights with {names} are others than the report's")),
            );
        }
    }

    let codecs = Codecs::of(&pairs, &args.codecs)?;
    if picture.is_some() && !pairs.is_empty() {
        if pairs.iter().all(|pair| !pair.has_queries) {
            return Err(Failure::at("--svg", "KL and NRMSE need queries, which the file has not"));
        }
        if codecs.values.iter().all(|codec| codec.dtype().is_some()) {
            let what = "codecs that quantize are drawn, expected one in --codecs, such as int8";
            return Err(Failure::at("--svg", what));
        }
    }
    let measured = measure(&pairs, &codecs, args.rows);
    let mut answered = Vec::new();
    for (pair, measured) in pairs.iter().zip(&measured) {
        match measured {
            Ok(measured) => answered.push((pair, measured)),
            Err(why) => {
                let (name, why) = (&pair.name, archive.refuse(format_args!("{}: {why}", pair.name)));
                refused.push(Refused { name: name.clone(), why });
            }
        }
    }
    for Refused { why, .. } in &refused {
        report::note(format_args!("flashtile: {why}"));
    }
    let status = if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) };
    let all = Sums::total(answered.iter().map(|(_, measured)| &measured.all));
    let gate = Gate { kl: args.max_kl, nrmse: args.max_nrmse };
    let candidates = choice::candidates(&answered, &codecs);
    let choice = choice::choose(&candidates, &codecs, gate);
    let (candidates, unread, refused) = (&candidates[..], &unread[..], &refused[..]);
    let report =
        Report { args, codecs: &codecs, gate, pairs: answered, refused, unread, all, candidates, choice };
    if let (Some(picture), Some(all)) = (picture, &report.all) {
        picture::draw(&report, all, &picture)?;
    }
    if args.json {
        report::line(report.json())?;
    } else if let Some(all) = &report.all {
        report::text(report.text(all))?;
    }
    Ok(status)
}

impl Report<'_> {
    /// Bits of an element with both in a codec.
    fn bits(&self, key: usize, value: usize) -> f64 {
        choice::bits(&self.pairs, [self.codecs.keys[key].codec, self.codecs.values[value]])
    }

    /// The codec of values that is also that of keys.
    fn same(&self, key: usize) -> usize {
        let codec = self.codecs.keys[key].codec;
        self.codecs.values.iter().position(|value| *value == codec).unwrap_or(0)
    }

    /// The head of all pairs with the greatest mean divergence: pair, head, divergence.
    fn worst_head(&self, key: usize) -> Option<(&str, usize, f64)> {
        let heads = self.pairs.iter().filter_map(|(pair, measured)| {
            let (head, kl) = measured.worst_head(key)?;
            Some((pair.name.as_str(), head, kl))
        });
        heads.max_by(|a, b| a.2.total_cmp(&b.2))
    }
}
