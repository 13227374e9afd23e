//! Parsers of option values.

use crate::nearest;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command};
use flashtile::plan::Isa;
use flashtile::{Codec, Dtype, QOffset, Visibility};
use std::ffi::OsStr;
use std::num::NonZero;

/// A parser of values with names, which help lists and shells complete. Errors come from `parse`, which may accept
/// more than the names.
#[derive(Clone)]
pub(crate) struct ByName<T> {
    names: Vec<&'static str>,
    parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> ByName<T> {
    pub(crate) fn new(
        names: impl IntoIterator<Item = &'static str>,
        parse: fn(&str) -> Result<T, String>,
    ) -> Self {
        Self { names: names.into_iter().collect(), parse }
    }
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for ByName<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, text: &OsStr) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, text)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().map(PossibleValue::new)))
    }
}

/// Parses dtypes.
pub(crate) fn dtype() -> ByName<Dtype> {
    ByName::new(Dtype::ALL.map(Dtype::name), one_dtype)
}

/// Parses codecs.
pub(crate) fn codec() -> ByName<Codec> {
    ByName::new(Codec::ALL.map(Codec::name), one_codec)
}

/// Parses a codec for keys and values, or two: `int8`, `int8+tq5`.
pub(crate) fn codec_pair() -> ByName<[Codec; 2]> {
    ByName::new(Codec::ALL.map(Codec::name), |text| {
        let (k, v) = text.split_once('+').unwrap_or((text, text));
        Ok([one_codec(k)?, one_codec(v)?])
    })
}

/// Parses instruction sets.
pub(crate) fn isa() -> ByName<Isa> {
    ByName::new(Isa::ALL.map(Isa::name), one_isa)
}

/// Parses offsets of queries: two names, or a number.
pub(crate) fn q_offset() -> ByName<QOffset> {
    ByName::new(["top-left", "bottom-right"], one_q_offset)
}

pub(crate) fn prefix(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected the part of names before q, k and v, such as layer.3".to_owned()),
        prefix => Ok(prefix.to_owned()),
    }
}

fn one_dtype(text: &str) -> Result<Dtype, String> {
    Dtype::ALL.into_iter().find(|d| d.name() == text).ok_or_else(|| "expected f32, f16 or bf16".to_owned())
}

fn one_codec(text: &str) -> Result<Codec, String> {
    let known = Codec::ALL.into_iter().find(|codec| codec.name() == text);
    known.ok_or_else(|| {
        format!("{text} is not a codec, {}", nearest::expected(text, Codec::ALL.map(Codec::name)))
    })
}

fn one_isa(text: &str) -> Result<Isa, String> {
    let known = Isa::ALL.into_iter().find(|isa| isa.name() == text);
    known.ok_or_else(|| format!("expected one of {}", Isa::ALL.map(Isa::name).join(", ")))
}

fn one_q_offset(text: &str) -> Result<QOffset, String> {
    match text {
        "top-left" => Ok(QOffset::TopLeft),
        "bottom-right" => Ok(QOffset::BottomRight),
        number => number
            .parse()
            .map(QOffset::At)
            .map_err(|_| "expected top-left, bottom-right or a whole number".to_owned()),
    }
}

pub(crate) fn window(text: &str) -> Result<Visibility, String> {
    let side = |text: &str| match text.trim() {
        "-1" => Ok(None),
        number => number
            .parse::<usize>()
            .map(Some)
            .map_err(|_| "expected LEFT or LEFT,RIGHT, each a number of keys or -1 for unbounded".to_owned()),
    };
    match text.split_once(',') {
        None => Ok(Visibility::window(side(text)?, None)),
        Some((left, right)) => Ok(Visibility::window(side(left)?, side(right)?)),
    }
}

pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a whole number, 1 or more".to_owned())
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let inside = |x: &f64| x.is_finite() && *x > 0.0;
    text.parse().ok().filter(inside).ok_or_else(|| "expected a finite number above 0".to_owned())
}

/// A power of deviations: from 0, which changes nothing, to 2.
pub(crate) fn power(text: &str) -> Result<f32, String> {
    let inside = |x: &f32| (0.0..=2.0).contains(x);
    text.parse().ok().filter(inside).ok_or_else(|| "expected a number from 0 to 2".to_owned())
}

/// A number of threads, at most as many as the machine has: more would wait for each other, and measurements would mean
/// nothing.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    let available = std::thread::available_parallelism().map_or(1, NonZero::get);
    let inside = |n: &usize| (1..=available).contains(n);
    let expected = || format!("expected a whole number, 1 to {available}, the threads of this machine");
    text.parse().ok().filter(inside).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_and_offsets() {
        assert_eq!(window("4").unwrap(), Visibility::window(Some(4), None));
        assert_eq!(window("-1,0").unwrap(), Visibility::causal());
        assert_eq!(window("4,5").unwrap(), Visibility::window(Some(4), Some(5)));
        assert!(["", "a", "1,2,3", "-2", "1,", "1.5"].iter().all(|text| window(text).is_err()));
        assert_eq!(one_q_offset("-7").unwrap(), QOffset::At(-7));
        assert_eq!(one_q_offset("bottom-right").unwrap(), QOffset::BottomRight);
        assert!(one_q_offset("bottom").is_err());
    }
}
