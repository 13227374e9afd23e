//! Names of tensors: their aliases, and groups of names that are the keys, values and queries of a layer.

use crate::escape::escaped;
use crate::failure::{Failure, Result};
use crate::input::{Archive, Mapped};
use crate::report;
use std::collections::{BTreeMap, BTreeSet};

/// Canonical names of tensors, and their aliases in files.
const ALIASES: [(&str, &[&str]); 4] = [
    ("q", &["query", "queries"]),
    ("k", &["key", "keys"]),
    ("v", &["value", "values"]),
    ("mask", &["attn_mask", "attention_mask"]),
];

/// The canonical name of a tensor.
pub(crate) fn canonical(name: &str) -> &str {
    let of = ALIASES.iter().find(|(_, aliases)| aliases.contains(&name));
    of.map_or(name, |(canonical, _)| canonical)
}

/// The reason to refuse two names of one tensor.
fn twice(a: &str, b: &str) -> String {
    format!("tensors {a} and {b} are the same input under two names, expected one of them")
}

/// Separators of the components of a name.
const SEPARATORS: [char; 4] = ['.', '/', '_', '-'];

/// Prefix of gradients in the files of `flashtile run`, which no cache stores.
const GRADIENTS: &str = "d_";

/// Names of the keys, values and queries of one layer.
pub(crate) struct Names {
    /// Each name up to its last component.
    pub(crate) prefix: String,
    pub(crate) k: Option<String>,
    pub(crate) v: Option<String>,
    pub(crate) q: Option<String>,
}

impl Names {
    /// The common part of the names, or both names if there is none, on one line.
    pub(crate) fn label(&self) -> String {
        let label = self.prefix.trim_end_matches(SEPARATORS);
        if !label.is_empty() {
            return escaped(label, &[]).into_owned();
        }
        let names = [&self.k, &self.v].into_iter().flatten().map(|name| escaped(name, &[]));
        names.collect::<Vec<_>>().join(" and ")
    }
}

/// Groups names by what precedes their last component. Also returns the names that belong to no group.
///
/// # Errors
/// If a tensor of a group has two names.
pub(crate) fn group<'n>(
    names: impl Iterator<Item = &'n str>,
) -> std::result::Result<(Vec<Names>, Vec<String>), String> {
    let (mut groups, mut others): (BTreeMap<&str, Names>, Vec<String>) = Default::default();
    for name in names {
        let at = name.rfind(SEPARATORS).map_or(0, |at| at + 1);
        let (prefix, last) = name.split_at(at);
        let component = ["k", "v", "q"].iter().position(|component| *component == canonical(last));
        let is_gradient =
            prefix.strip_suffix(GRADIENTS).is_some_and(|of| of.is_empty() || of.ends_with(SEPARATORS));
        let Some(component) = component.filter(|_| !is_gradient) else {
            others.push(name.to_owned());
            continue;
        };
        let new = || Names { prefix: prefix.to_owned(), k: None, v: None, q: None };
        let names = groups.entry(prefix).or_insert_with(new);
        let place = [&mut names.k, &mut names.v, &mut names.q].into_iter().nth(component);
        if let Some(other) = place.and_then(|place| place.replace(name.to_owned())) {
            return Err(twice(&other, name));
        }
    }
    let mut groups: Vec<Names> = groups.into_values().collect();
    groups.sort_by_cached_key(|names| natural(&names.prefix));
    Ok((groups, others))
}

/// Maps canonical names to names in a file. `parts` pairs each name in the file with what remains of it without the
/// prefix of a layer.
///
/// # Errors
/// If a tensor has two names.
fn resolve<'n>(
    parts: impl Iterator<Item = (&'n str, &'n str)>,
) -> std::result::Result<BTreeMap<String, &'n str>, String> {
    let mut names: BTreeMap<String, &str> = BTreeMap::new();
    for (name, rest) in parts {
        if let Some(other) = names.insert(canonical(rest).to_owned(), name) {
            return Err(twice(other, name));
        }
    }
    Ok(names)
}

/// A sort key that orders names by the numbers in them: layer 2 comes before layer 10.
fn natural(name: &str) -> String {
    let chars: Vec<char> = name.chars().collect();
    let parts = chars.chunk_by(|a, b| a.is_ascii_digit() && b.is_ascii_digit());
    parts.map(|part| format!("{:0>24}", part.iter().collect::<String>())).collect()
}

/// The tensors of a file, or of the layer with a prefix, under their canonical names.
pub(crate) fn archive<'a>(mapped: &'a Mapped<'_>, prefix: Option<&str>) -> Result<Archive<'a>> {
    let archive = mapped.archive()?;
    match prefix {
        None => {
            let names = resolve(archive.names().map(|name| (name, name)));
            Ok(archive.part(None, &names.map_err(|twice| archive.refuse(twice))?))
        }
        Some(prefix) => layer(&archive, prefix),
    }
}

/// Labels of the layers of a file that have q, k and v.
pub(crate) fn layers(archive: &Archive<'_>) -> Vec<String> {
    let Ok((groups, _)) = group(archive.names()) else { return Vec::new() };
    let whole = |names: &&Names| {
        !names.prefix.is_empty() && [&names.q, &names.k, &names.v].into_iter().all(Option::is_some)
    };
    groups.iter().filter(whole).map(Names::label).collect()
}

/// The tensors of one layer as an archive: `q`, `k` and `v`; other tensors with the layer's prefix, under names without
/// it; and tensors without a layer's prefix, which apply to all layers.
fn layer<'a>(archive: &Archive<'a>, prefix: &str) -> Result<Archive<'a>> {
    let refuse = |twice| archive.refuse(twice);
    let (groups, others) = group(archive.names()).map_err(refuse)?;
    let same = |of: &str| of.trim_end_matches(SEPARATORS) == prefix.trim_end_matches(SEPARATORS);
    let exact: Vec<&Names> = groups.iter().filter(|names| names.prefix == prefix).collect();
    let near = groups.iter().filter(|names| !names.prefix.is_empty() && same(&names.prefix));
    let chosen: Vec<&Names> = if exact.is_empty() { near.collect() } else { exact };
    let [layer] = chosen[..] else {
        let first = |names: &Names| {
            [&names.k, &names.v, &names.q].into_iter().flatten().next().cloned().unwrap_or_default()
        };
        let found: Vec<String> = chosen.iter().map(|names| first(names)).collect();
        let what = match &found[..] {
            [] => {
                let layers = layers(archive);
                let names: Vec<&str> = archive.names().collect();
                let has = match (&*layers, &*names) {
                    ([], []) => "no tensor".to_owned(),
                    ([], names) => report::some(names),
                    (layers, _) => report::some(layers),
                };
                archive.refuse(format_args!("no q, k and v with that prefix (the file has {has})"))
            }
            found => archive.refuse(format_args!(
                "{} belong to different layers, expected a prefix of one",
                report::some(found)
            )),
        };
        return Err(Failure::at(format_args!("--prefix {prefix}"), what));
    };

    let prefixes: BTreeSet<&str> = groups.iter().map(|of| of.prefix.as_str()).collect();
    // Length of the prefix of the innermost layer that a name belongs to; 0 if there is none.
    let of_layer = |name: &str| {
        let starts = name.rmatch_indices(SEPARATORS).map(|(at, _)| at + 1);
        starts.into_iter().find(|&at| prefixes.contains(&name[..at])).unwrap_or(0)
    };
    let of_prefix = |prefix: &str| {
        let parts = others.iter().filter_map(|name| {
            let (of, rest) = name.split_at(of_layer(name));
            (of == prefix).then_some((name.as_str(), rest))
        });
        resolve(parts).map_err(refuse)
    };
    let mut tensors = of_prefix("")?;
    // For a layer without a prefix, this adds the same tensors again.
    tensors.extend(of_prefix(&layer.prefix)?);
    for (name, of) in [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)] {
        if let Some(of) = of {
            tensors.insert(name.to_owned(), of);
        }
    }
    Ok(archive.part(Some(layer.label()), &tensors))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> (Vec<[String; 4]>, Vec<String>) {
        let (groups, others) = group(names.iter().copied()).unwrap();
        let of = |name: Option<String>| name.unwrap_or_default();
        (groups.into_iter().map(|n| [n.label(), of(n.k), of(n.v), of(n.q)]).collect(), others)
    }

    #[test]
    fn names_are_paired_by_their_last_component() {
        let (pairs, others) = found(&[
            "layers.10.self_attn.v",
            "layers.10.self_attn.k",
            "layers.2.self_attn.k",
            "layers.2.self_attn.v",
            "layers.2.self_attn.q",
            "past_key_values.0.key",
            "past_key_values.0.value",
            "k",
            "v",
            "out",
            "d_k",
            "d_v",
            "layer.3.d_k",
            "mask",
            "layer.3.q",
        ]);
        let labels: Vec<&str> = pairs.iter().map(|pair| pair[0].as_str()).collect();
        let expected =
            ["k and v", "layer.3", "layers.2.self_attn", "layers.10.self_attn", "past_key_values.0"];
        assert_eq!(labels, expected);
        assert_eq!(
            pairs[2][1..],
            ["layers.2", "layers.2", "layers.2"]
                .map(str::to_owned)
                .iter()
                .zip(["k", "v", "q"])
                .map(|(p, c)| format!("{p}.self_attn.{c}"))
                .collect::<Vec<_>>()[..]
        );
        assert_eq!(
            pairs[4][1..],
            ["past_key_values.0.key", "past_key_values.0.value", ""].map(str::to_owned)
        );
        assert_eq!(others, ["out", "d_k", "d_v", "layer.3.d_k", "mask"]);
        assert_eq!(
            found(&["a.k", "a.value", "a.query"]).0,
            [["a", "a.k", "a.value", "a.query"].map(str::to_owned)]
        );
    }

    #[test]
    fn a_tensor_has_one_name() {
        let why = "tensors a.k and a.key are the same input under two names, expected one of them";
        assert_eq!(group(["a.k", "b.key", "a.key"].into_iter()).err().as_deref(), Some(why));
        let same = |names: &[&'static str]| resolve(names.iter().map(|name| (*name, *name)));
        for (canonical, aliases) in ALIASES {
            for alias in aliases {
                assert_eq!(same(&[alias]).unwrap(), BTreeMap::from([(canonical.to_owned(), *alias)]));
                assert!(same(&[alias, canonical]).unwrap_err().contains(alias), "{alias}");
            }
        }
        assert!(same(&["attn_mask", "attention_mask"]).is_err() && same(&["mask", "mask_2"]).is_ok());
    }

    #[test]
    fn numbers_are_in_order() {
        let mut names = vec!["layer.10", "layer.9", "layer.2.x", "layer.02", "a", "layer.", "b9c", "b9"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["a", "b9", "b9c", "layer.", "layer.02", "layer.2.x", "layer.9", "layer.10"]);
    }
}
