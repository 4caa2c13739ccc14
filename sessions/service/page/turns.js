// Messages as turns: a turn begins where the user speaks.

/**
 * `[{at, later, messages}]`: `at` is the index of the turn's first message, `later` how many turns come after it.
 * What comes before the user first speaks is a turn without a question.
 */
export function turnsOf(messages) {
  const turns = [];
  messages.forEach((message, at) => {
    if (message.role === "user" || turns.length === 0) turns.push({ at, messages: [] });
    turns.at(-1).messages.push(message);
  });
  return turns.map((turn, number) => ({ ...turn, later: turns.length - 1 - number }));
}

export function asks(turn) {
  return turn.messages[0].role === "user";
}
