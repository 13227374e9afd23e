//! Any bytes as the input file of `flashtile run`.

#![no_main]
#![allow(dead_code)]

mod reading;

use libfuzzer_sys::fuzz_target;
use reading::*;

fuzz_target!(|data: &[u8]| read(data));
