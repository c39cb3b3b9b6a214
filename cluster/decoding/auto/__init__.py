"""Policy `auto`: what it believes, what it forecasts, and what it chooses for each cohort."""
