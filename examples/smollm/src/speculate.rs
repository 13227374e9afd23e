//! Speculative decoding without a second model. The tokens that followed the last few tokens earlier in the conversation are drafts of
//! the tokens to come: two branches of a tree, which one step computes under a mask. Accepted tokens are those that greedy decoding
//! gives, one by one, since attention gives a row the same bits in any company.

use crate::session::Session;
use anyhow::Result;
use candle_core::{D, Device, Tensor};
use flashtile_candle::{Mask, Options};

/// Last tokens that are looked up, the most first.
const LOOKED_UP: [usize; 2] = [3, 2];
/// Tokens of a branch at most.
const DRAFT: usize = 6;

/// Two drafts of the tokens to come, at most `room` tokens in all. The first tokens of the branches differ.
fn drafts(tokens: &[u32], room: usize) -> [&[u32]; 2] {
    let mut found: [&[u32]; 2] = [&[], &[]];
    for n in LOOKED_UP {
        let Some(earlier) = tokens.len().checked_sub(n) else { continue };
        let last = &tokens[earlier..];
        // The latest occurrence comes first.
        for at in (0..earlier).rev().filter(|&at| &tokens[at..at + n] == last) {
            let draft = &tokens[at + n..tokens.len().min(at + n + DRAFT)];
            if found[0].is_empty() {
                found[0] = &draft[..draft.len().min(room)];
            } else if draft[0] != found[0][0] {
                found[1] = &draft[..draft.len().min(room - found[0].len())];
                return found;
            }
        }
    }
    found
}

/// The keys that each row sees, U8 `(rows, base + rows)`: all of them, but rows of the second branch do not see the first. Causality, which a
/// step has anyway, hides later keys.
fn tree_mask(base: usize, trunk: usize, [first, second]: [usize; 2]) -> Result<Mask> {
    let (rows, keys) = (trunk + first + second, base + trunk + first + second);
    let mut visible = vec![1u8; rows * keys];
    for row in trunk + first..rows {
        visible[row * keys + base + trunk..][..first].fill(0);
    }
    Ok(Mask::Visible(Tensor::from_vec(visible, (rows, keys), &Device::Cpu)?))
}

/// The tokens of a branch that greedy decoding gives, and the token after them. `next` has the token after the last token of the trunk,
/// then after each token of the branch.
fn accepted(branch: &[u32], next: impl Fn(usize) -> u32) -> Vec<u32> {
    let right = branch.iter().enumerate().take_while(|&(n, &token)| token == next(n)).count();
    (0..=right).map(next).collect()
}

/// Computes pending tokens and drafts in one step, and adds the tokens that it gives, at least one, to the session. The cache keeps the
/// rows of the pending tokens and of the accepted part of the first branch; accepted tokens of the second are pending in the next step.
pub fn next(session: &mut Session<'_>) -> Result<Vec<u32>> {
    let base = session.cached()?;
    let pending = &session.tokens[base..];
    let trunk = pending.len();
    let branches = drafts(&session.tokens, session.context - session.tokens.len());
    let lens = branches.map(<[u32]>::len);
    let rows = [pending, branches[0], branches[1]].concat();
    let after = base + trunk;
    let positions = (base..after).chain(after..after + lens[0]).chain(after..after + lens[1]);
    let positions: Vec<u32> = positions.map(|position| position as u32).collect();
    let options = Options::decode().mask(tree_mask(base, trunk, lens)?);
    let mut step = session.cache.step(&[(session.seq, rows.len())])?;
    let hidden = session
        .model
        .forward(&rows, &positions, |layer, q, k, v| Ok(step.attend_with(layer, q, k, v, &options)?.0))?;
    step.finish()?;
    let hidden = hidden.narrow(0, trunk - 1, 1 + lens[0] + lens[1])?;
    let next: Vec<u32> = session.model.logits(&hidden)?.argmax(D::Minus1)?.to_vec1()?;

    let after_first = |n| next[n];
    let after_second = |n| if n == 0 { next[0] } else { next[lens[0] + n] };
    let [first, second] = [accepted(branches[0], after_first), accepted(branches[1], after_second)];
    let (kept, new) = if second.len() > first.len() { (0, second) } else { (first.len() - 1, first) };
    session.cache.truncate(session.seq, after + kept)?;
    session.tokens.extend(&new);
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::{accepted, drafts};

    const NONE: [&[u32]; 2] = [&[], &[]];

    #[test]
    fn branches_are_the_latest_continuations_that_differ() {
        let tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 8, 1, 2, 3];
        assert_eq!(drafts(&tokens, 100), [&[5, 8, 1, 2, 3][..], &[4, 9, 1, 2, 3, 5]]);
        assert_eq!(drafts(&tokens, 7), [&[5, 8, 1, 2, 3][..], &[4, 9]]);
        assert_eq!(drafts(&tokens, 0), NONE);
        assert_eq!(drafts(&[1, 2, 3, 4], 100), NONE);
        // Two last tokens are enough where three occurred nowhere else.
        assert_eq!(drafts(&[7, 2, 3, 4, 8, 2, 3], 100), [&[4, 8, 2, 3][..], &[]]);
    }

    #[test]
    fn a_branch_is_accepted_up_to_its_first_wrong_token() {
        let next = |n| [4, 5, 6, 7][n];
        assert_eq!(accepted(&[4, 5, 9], next), [4, 5, 6]);
        assert_eq!(accepted(&[4, 5, 6], next), [4, 5, 6, 7]);
        assert_eq!(accepted(&[9], next), [4]);
        assert_eq!(accepted(&[], next), [4]);
    }
}
