//! Encodings of types, and lists that the caller frees.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::null_mut;

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
}

/// Memory that `free` frees.
pub(crate) unsafe fn allocated(bytes: usize) -> *mut c_void {
    let at = malloc(bytes.max(1));
    assert!(!at.is_null(), "out of memory: {bytes} bytes");
    at
}

/// The types of a method's encoding: result, then arguments, without the offsets that GCC puts between them.
pub(crate) fn types(encoding: &CStr) -> Vec<&str> {
    let all = encoding.to_str().expect("an encoding is ASCII");
    let bytes = all.as_bytes();
    let (mut found, mut start, mut depth, mut i) = (Vec::new(), 0, 0usize, 0);
    while i < bytes.len() {
        let is_whole = match bytes[i] {
            b'(' | b'{' | b'[' => {
                depth += 1;
                false
            }
            b')' | b'}' | b']' => {
                depth -= 1;
                true
            }
            // Qualifiers and pointers belong to the type that follows.
            b'^' | b'r' | b'n' | b'N' | b'o' | b'O' | b'R' | b'V' | b'A' | b'j' => false,
            b'@' if bytes.get(i + 1) == Some(&b'?') => {
                i += 1;
                true
            }
            b'0'..=b'9' if depth == 0 => {
                start = i + 1;
                false
            }
            _ => true,
        };
        i += 1;
        if is_whole && depth == 0 {
            found.push(&all[start..i]);
            start = i;
        }
    }
    found
}

/// A text that the caller frees.
pub(crate) unsafe fn copied_text(text: Option<&str>) -> *mut c_char {
    let Some(text) = text else { return null_mut() };
    let at: *mut c_char = allocated(text.len() + 1).cast();
    std::ptr::copy_nonoverlapping(text.as_ptr().cast(), at, text.len());
    at.add(text.len()).write(0);
    at
}

/// A list that the caller frees, closed by NULL, and its length.
pub(crate) unsafe fn copied_list<T>(
    all: impl Iterator<Item = *const T>,
    count: *mut c_uint,
) -> *mut *const T {
    let all: Vec<*const T> = all.collect();
    if !count.is_null() {
        *count = all.len() as c_uint;
    }
    let at: *mut *const T = allocated((all.len() + 1) * size_of::<*const T>()).cast();
    std::ptr::copy_nonoverlapping(all.as_ptr(), at, all.len());
    at.add(all.len()).write(std::ptr::null());
    at
}

#[cfg(test)]
mod tests {
    use super::types;

    #[test]
    fn encodings_fall_into_types() {
        assert_eq!(types(c"v@:"), ["v", "@", ":"]);
        assert_eq!(types(c"@24@0:8^v16"), ["@", "@", ":", "^v"]);
        assert_eq!(types(c"{?=QQQ}@:@?^{?=qq}[4i]"), ["{?=QQQ}", "@", ":", "@?", "^{?=qq}", "[4i]"]);
    }
}
