//! The classes of Foundation that a Metal host uses, named as GNUstep's, whose encodings of strings `objc2-foundation` expects.

mod array;
mod data;
mod dictionary;
mod enumerator;
mod error;
mod number;
mod pool;
mod process;
mod string;
mod url;

pub(crate) use array::{array, objects_of};
pub(crate) use data::data;
pub(crate) use dictionary::{dictionary, pairs_of};
pub(crate) use error::{constant, error, refuse};
pub(crate) use number::display;
pub(crate) use process::{System, set_system, system};
pub(crate) use url::path_of;

use objc2::ClassType;

/// Has the runtime make these classes.
pub(crate) fn register() {
    let _ = (string::Text::class(), array::Array::class(), enumerator::Enumerator::class());
    let _ =
        (dictionary::Dictionary::class(), number::Number::class(), url::Url::class(), data::Data::class());
    let _ = (error::Error::class(), process::Process::class(), pool::Pool::class());
    error::keys();
}
