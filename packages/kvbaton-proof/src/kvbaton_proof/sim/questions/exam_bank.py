"""All questions, in one order: which world asks which follows from its seed."""

from __future__ import annotations

from kvbaton_proof.sim.questions import (
    exam_books,
    exam_cards,
    exam_moves,
    exam_words,
    interview_d,
    interview_door,
    interview_greeting,
    interview_more,
    interview_node,
    interview_origins,
    interview_p,
    interview_push,
    interview_writer,
)
from kvbaton_proof.sim.questions.exam import Question

BANK: list[Question] = [
    *exam_books.BANK,
    *exam_words.BANK,
    *exam_moves.BANK,
    *exam_cards.BANK,
    *interview_p.BANK,
    *interview_writer.BANK,
    *interview_greeting.BANK,
    *interview_d.BANK,
    *interview_push.BANK,
    *interview_more.BANK,
    *interview_node.BANK,
    *interview_door.BANK,
    exam_moves.already_there,  # whatever is new comes last: the seeds that are remembered stay right
    interview_greeting.narrow,
    *interview_origins.BANK,
    interview_p.outlives_its_ticket,
]
