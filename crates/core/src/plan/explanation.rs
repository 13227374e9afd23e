//! Plans in words and as data.

/// A device and a plan in words, for people, and as fields, for programs.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Explanation {
    /// The device: `avx2, 8 threads, L1d 32 KiB`.
    pub machine: String,
    /// Headings and sentences: `("splits", "4: threads wait for an estimated 1.2% of the time")`.
    pub lines: Vec<(&'static str, String)>,
    /// Facts of the device and sizes of the plan, beside those that every plan has.
    pub fields: Vec<(&'static str, Field)>,
}

/// A value of an [`Explanation`], as JSON has them.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(untagged))]
#[allow(clippy::exhaustive_enums)]
pub enum Field {
    /// A count or a number of bytes.
    Count(usize),
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Field>),
    /// Fields with names.
    Object(Fields),
}

/// Named fields in order.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Fields(pub Vec<(&'static str, Field)>);

#[cfg(feature = "serde")]
impl serde::Serialize for Fields {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, field)| (name, field)))
    }
}

impl From<usize> for Field {
    fn from(count: usize) -> Self {
        Self::Count(count)
    }
}

impl From<f64> for Field {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Field {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Field {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl<T: Into<Self>> FromIterator<T> for Field {
    fn from_iter<I: IntoIterator<Item = T>>(fields: I) -> Self {
        Self::List(fields.into_iter().map(Into::into).collect())
    }
}

impl From<Vec<(&'static str, Self)>> for Field {
    fn from(fields: Vec<(&'static str, Self)>) -> Self {
        Self::Object(Fields(fields))
    }
}
